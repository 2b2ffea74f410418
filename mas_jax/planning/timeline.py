"""What goes on at once in a device: work, collectives on the links, transfers between memories.

Must not know: programs, chips, models.
"""

from dataclasses import dataclass, field


@dataclass
class Timeline:
    """Where one run of a computation is: seconds so far; when each lane of the links is free;
    collectives on their way; transfers and their seconds of HBM still to come, in order."""

    clock: float = 0.0
    lanes: dict[str, float] = field(default_factory=dict)
    sent: dict[str, tuple] = field(default_factory=dict)
    transfers: dict[str, float] = field(default_factory=dict)

    def work(self, seconds: float, memory_s: float) -> None:
        """Goes on, while transfers take the HBM bandwidth that is left."""
        self.clock += seconds
        spare = seconds - memory_s
        for name, left in self.transfers.items():
            taken = min(left, max(spare, 0.0))
            self.transfers[name], spare = left - taken, spare - taken

    def send(
        self, name: str, lane: str, kind: str, num_bytes: float, seconds: float, group: int
    ) -> None:
        """A collective begins when its lane is free; "" is all lanes together."""
        free = [self.lanes.get("", 0.0), self.lanes.get(lane, 0.0)]
        end = max(self.clock, *(free if lane else self.lanes.values()), *free) + seconds
        self.lanes[lane] = end
        self.sent[name] = (kind, num_bytes, seconds, group, end)

    def receive(self, name: str) -> float:
        """Seconds until a transfer is there, and all that began before it."""
        waited = 0.0
        for first in list(self.transfers):
            waited += self.transfers.pop(first)
            if first == name:
                break
        self.clock += waited
        return waited
