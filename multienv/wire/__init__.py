"""What travels between the trainer and a worker: frames, spaces laid out in memory, shared memory."""
