"""What runs beside the env: the dispatcher (``host``), and a process around it (``main``)."""
