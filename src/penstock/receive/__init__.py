"""Bytes in, points out: what comes over the network is taken, bounded and answered only when it is safe."""
