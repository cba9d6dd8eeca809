"""The network of a cluster as a fat tree: hosts, racks and pods, with links that may be oversubscribed.

Files:
    tree          The shape of the tree, the place of each node in it, and the links between two nodes
    tree_network  Flows over the links of the tree: max-min fair shares, or the most urgent flows first
"""
