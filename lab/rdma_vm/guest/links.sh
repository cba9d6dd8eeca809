# Sourced in the guest. rxe0 on a dummy device (both ends of a connection on it), and two rails: veth pairs with one
# device per end, rxa0 <-> rxb0 and rxa1 <-> rxb1, at 10.77.RAIL.1 and .2. All ends stay in one network namespace, so the
# kernel must accept packets from its own addresses, and the neighbour entries are set explicitly.
sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
sysctl -qw net.ipv4.conf.all.accept_local=1 net.ipv4.conf.default.accept_local=1
ip link add dummy0 type dummy
ip addr add 10.76.0.1/24 dev dummy0
ip link set dummy0 mtu 9000 up
rdma link add rxe0 type rxe netdev dummy0
for rail in 0 1; do
    ip link add "va$rail" type veth peer name "vb$rail"
    ip addr add "10.77.$rail.1/24" dev "va$rail"
    ip addr add "10.77.$rail.2/24" dev "vb$rail"
    ip link set "va$rail" mtu 4300 up
    ip link set "vb$rail" mtu 4300 up
    ip neigh replace "10.77.$rail.2" lladdr "$(< "/sys/class/net/vb$rail/address")" dev "va$rail" nud permanent
    ip neigh replace "10.77.$rail.1" lladdr "$(< "/sys/class/net/va$rail/address")" dev "vb$rail" nud permanent
    rdma link add "rxa$rail" type rxe netdev "va$rail"
    rdma link add "rxb$rail" type rxe netdev "vb$rail"
done
