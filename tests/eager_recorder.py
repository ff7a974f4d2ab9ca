"""Stands in for what records steps on a GPU: it runs a step as soon as it is started.

So the order of what is asked for is a GPU's, and what is read late is what was copied then.
"""


class EagerCopy:
    """What the tensor held when the copy began; refuses to lose a copy that nobody read."""

    def __init__(self, name, source, log):
        self.name, self.source, self.log = name, source, log
        self.held = None

    def begin(self):
        assert self.held is None, "overwritten before it was read"
        self.held = self.source.tolist()
        self.log.append(f"copy {self.name}")

    def read(self):
        held, self.held = self.held, None
        assert held is not None, "read before it was copied"
        self.log.append(f"read {self.name}")
        return held


class EagerRecorder:
    """Runs what was recorded, and says in what order things were asked for."""

    def __init__(self):
        self.log = []
        self.recorded = 0
        self.copies = 0

    def record(self, run):
        run()
        number = self.recorded
        self.recorded += 1

        def replay():
            self.log.append(f"start {number}")
            run()

        return replay

    def host_copy(self, source):
        self.copies += 1
        return EagerCopy(self.copies, source, self.log)
