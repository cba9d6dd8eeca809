"""Which memory is registered."""

from connect.store import codes
from connect.store.registered import Registered


def test_ranges_do_not_overlap():
    memory = Registered()
    assert memory.add(1000, 100) == codes.OK
    assert memory.add(1100, 50) == codes.OK
    for start, nbytes in ((1000, 100), (990, 11), (1099, 1), (1149, 5), (900, 1000), (0, 5), (5, 0)):
        assert memory.add(start, nbytes) == codes.INVALID, (start, nbytes)
    assert memory.add(990, 10) == codes.OK
    assert memory.remove(1001) == codes.INVALID
    assert memory.remove(1000) == codes.OK
    assert memory.remove(1000) == codes.INVALID
    assert memory.add(1050, 50) == codes.OK
