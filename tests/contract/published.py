"""ARC and S3-FIFO as they are published, to compare with."""


class Figure4:
    """ARC(c) of Megiddo and Modha, line by line, over lists with the LRU at index 0."""

    def __init__(self, c):
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def replace(self, x):
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def access(self, x):
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            self.p = min(c, self.p + max(len(b2) / len(b1), 1))
            self.replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            self.p = max(0, self.p - max(len(b1) / len(b2), 1))
            self.replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    self.replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                self.replace(x)
            t1.append(x)


class Algorithm1:
    """S3-FIFO of Yang et al. over lists with the oldest at index 0; promoted above one use, ghosts = main's size."""

    def __init__(self, size):
        self.size, self.share = size, max(1, int(0.1 * size))
        self.small, self.main, self.ghosts, self.freq = [], [], [], {}

    def access(self, x):
        if x in self.small or x in self.main:
            self.freq[x] = min(self.freq[x] + 1, 3)
            return
        while len(self.small) + len(self.main) >= self.size:
            if len(self.small) >= self.share or not self.main:
                self.evict_small()
            else:
                self.evict_main()
        if x in self.ghosts:
            self.ghosts.remove(x)
            self.main.append(x)
        else:
            self.small.append(x)
        self.freq[x] = 0

    def evict_small(self):
        t = self.small.pop(0)
        if self.freq[t] > 1:
            self.main.append(t)
            self.freq[t] = 0
            return
        self.ghosts.append(t)
        self.ghosts = self.ghosts[max(0, len(self.ghosts) - (self.size - self.share)) :]

    def evict_main(self):
        t = self.main.pop(0)
        if self.freq[t] > 0:
            self.main.append(t)
            self.freq[t] -= 1
