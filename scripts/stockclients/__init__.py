"""The runs of scripts/stock_clients.py: what each stock client is asked to do."""
