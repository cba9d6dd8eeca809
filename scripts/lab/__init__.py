"""Experiments on request traces: no node, no clock."""
