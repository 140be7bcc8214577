"""What trainer and worker share: memory, what lies in it, and how it is written and read."""
