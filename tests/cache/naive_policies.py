"""The eviction policies as their definitions read: lists, and a scan for every victim."""

from cache.pool.policies.s3fifo import MOST_USES, MOVE_USES, SMALL_SHARE
from cache.pool.policy import PLAIN


class Naive:
    """`items`: item -> [facts, uses, tick of the last use]; all in order of coming."""

    def __init__(self):
        self.items, self.in_use, self.tick = {}, set(), 0

    def use(self, item):
        self.tick += 1
        self.items[item][2] = self.tick

    def added(self, item, facts=PLAIN):
        self.items[item] = [facts, 1, 0]
        self.use(item)

    def touched(self, item):
        self.items[item][1] += 1
        self.use(item)

    def pinned(self, item):
        self.in_use.add(item)

    def unpinned(self, item):
        self.in_use.remove(item)
        self.use(item)

    def removed(self, item):
        del self.items[item]
        self.in_use.discard(item)

    def victim(self):
        free = [item for item in self.items if item not in self.in_use]
        if not free:
            raise LookupError
        return min(free, key=lambda item: self.rank(*self.items[item]))

    def __len__(self):
        return len(self.items) - len(self.in_use)


class NaiveLRU(Naive):
    def rank(self, facts, uses, last):
        return last

    def touched(self, item):
        if item not in self.in_use:
            super().touched(item)


class NaiveLFU(Naive):
    def rank(self, facts, uses, last):
        return (uses, last)


class NaiveFIFO(Naive):
    def rank(self, facts, uses, last):
        return 0  # `min` takes the first of equals


class NaiveLengthAware(Naive):
    def rank(self, facts, uses, last):
        return (uses, -facts.position, last)


class NaiveCostAware(Naive):
    """The level at an item's last use goes into its rank, so it is kept with it."""

    def __init__(self):
        super().__init__()
        self.level, self.level_at = 0.0, {}

    def use(self, item):
        super().use(item)
        self.level_at[item] = self.level

    def victim(self):
        free = [item for item in self.items if item not in self.in_use]
        if not free:
            raise LookupError
        worth = {item: self.level_at[item] + self.items[item][1] * self.items[item][0].cost_s for item in free}
        item = min(free, key=lambda item: (worth[item], self.items[item][2]))
        self.level = worth[item]
        return item


class NaiveS3FIFO:
    """One list of [item, queue, uses], oldest first; queue is small, main, or None while it waits for its unpin."""

    def __init__(self):
        self.rows, self.ghost, self.in_use, self.named = [], [], set(), None

    def row(self, item):
        return next(row for row in self.rows if row[0] == item)

    def to_end(self, row, queue):
        self.rows.remove(row)
        self.rows.append([row[0], queue, row[2]])

    def added(self, item, facts=PLAIN):
        back = item in self.ghost
        if back:
            self.ghost.remove(item)
        self.rows.append([item, "main" if back else "small", 0])

    def touched(self, item):
        self.row(item)[2] = min(MOST_USES, self.row(item)[2] + 1)

    def pinned(self, item):
        self.in_use.add(item)

    def unpinned(self, item):
        self.in_use.remove(item)
        if self.row(item)[1] is None:
            self.to_end(self.row(item), "main")

    def removed(self, item):
        row = self.row(item)
        self.rows.remove(row)
        self.in_use.discard(item)
        if row[1] == "small" and item == self.named:
            self.ghost.append(item)
        while len(self.ghost) > len(self.rows):
            self.ghost.pop(0)

    def victim(self):
        while True:
            small = [row for row in self.rows if row[1] == "small"]
            main = [row for row in self.rows if row[1] == "main"]
            if not small and not main:
                raise LookupError
            from_small = len(small) >= SMALL_SHARE * len(self.rows) or not main
            row = (small if from_small else main)[0]
            if row[0] in self.in_use:
                row[1] = None
            elif from_small and row[2] >= MOVE_USES:
                row[2] = 0
                self.to_end(row, "main")
            elif not from_small and row[2] > 0:
                row[2] -= 1
                self.to_end(row, "main")
            else:
                self.named = row[0]
                return row[0]

    def __len__(self):
        return len(self.rows) - len(self.in_use)
