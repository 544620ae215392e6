"""MOVER: bytes in, answers out: what comes over the network is taken, bounded and answered only when it is safe."""
