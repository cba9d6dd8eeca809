"""The packages that a wheel puts at the top of site-packages.

To use them from a checkout, add this folder to PYTHONPATH.

Files:
    mooncake/        Upstream Mooncake's Python names, on our nodes: mooncake.store, mooncake.engine, mooncake.pg and
                     others
    mooncake_rooms/  The rooms inside a program of others, under one name: mooncake_rooms.cache and so on
"""
