"""Where a host runs: in a process of its own, or in the trainer. One seam: :class:`base.Backend`."""
