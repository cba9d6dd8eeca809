"""Measured steps: what steps of this node take, when it starts and again while it is idle.

Files:
    calibration    Runs a few steps before the first request, so that the node's estimates fit its machine from the
                   start
    recalibration  Measures steps again while the node is idle, and corrects its cost models if they are wrong
"""
