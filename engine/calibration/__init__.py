"""Measured steps: what steps of this node take, when it starts and again while it is idle.

Files:
    calibration    Runs a few steps before the first request, so that the node's estimates fit its machine from the
                   start
    earlier        Measured steps of earlier starts, which a start takes instead of measuring, if a few steps agree
                   with them
    recalibration  Measures steps again while the node is idle, and corrects its cost models if they are wrong
"""
