"""Shared by all benchmark scripts: results, workloads, an OpenAI client, latency definitions.

Needs nothing of the serving packages, so the scripts also measure other servers.
"""
