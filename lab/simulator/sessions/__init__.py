"""Sessions of a simulated cluster.

Files:
    turns  The turns of sessions: their gaps are learned, and their blocks parked, by the classes of production
"""
