"""MOVER: sockets to requests, and answers back. A request is bounded, and answered only when it is safe."""
