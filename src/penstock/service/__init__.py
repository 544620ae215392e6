"""WIRING: assembles, starts and stops the stages."""
