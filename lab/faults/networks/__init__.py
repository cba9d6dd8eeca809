"""Networks of faults: nodes in namespaces, slow links between sites, cuts of connections, and floods of new ones.

Files:
    linked_sites        Nodes in network namespaces at two sites: two bridges with a slow link between them
    namespaces          Nodes in separate network namespaces, connected by a bridge: during a cut, the kernel drops
                        packets
    relay               A slow link between two TAP devices in user space: delay, rate and cuts, for kernels without
                        netem
    silent_connections  A flood of TCP connections that never finish what they begin, opened again when the other side
                        closes them
    tcp_way             TCP connections of this host through a process that can cut them: nobody is told, as of a
                        network that drops all
    two_sites           Nodes of two sites, and what they know of the link between them: the cases of cut-sites and
                        validate-sites
"""
