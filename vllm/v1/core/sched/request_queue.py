"""The order in which waiting requests are taken."""

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import Enum

from vllm.v1.request import Request


class SchedulingPolicy(Enum):
    """`fcfs`: as they came. `priority`: smallest priority number first, then as they
    came."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class RequestQueue(ABC):
    """Waiting requests; iteration gives them in the order in which they are taken."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Adds a request where it belongs."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Takes the next request. IndexError when there is none."""

    @abstractmethod
    def peek_request(self) -> Request:
        """The next request. IndexError when there is none."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Puts a request back that was taken out of turn: before all others, where the
        policy has no order of its own."""

    @abstractmethod
    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Puts several back; the first given comes first again."""

    def remove_request(self, request: Request) -> None:
        """Removes a request. ValueError when it is not here."""
        if not self.remove_requests([request]):
            raise ValueError(f"request {request.request_id!r} does not wait")

    @abstractmethod
    def remove_requests(self, requests: Iterable[Request]) -> int:
        """Removes those of the requests that are here, and says how many. However many
        wait, one is removed in constant time: clients that go away leave a queue one
        request at a time."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def __bool__(self) -> bool:
        return len(self) > 0


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        # A request is found here at once, wherever it stands.
        self._requests: OrderedDict[Request, None] = OrderedDict()

    def add_request(self, request: Request) -> None:
        self._requests[request] = None

    def pop_request(self) -> Request:
        request = self.peek_request()
        del self._requests[request]
        return request

    def peek_request(self) -> Request:
        for request in self._requests:
            return request
        raise IndexError("no request waits")

    def prepend_request(self, request: Request) -> None:
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in reversed(list(requests)):
            self.prepend_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> int:
        before = len(self._requests)
        for request in requests:
            self._requests.pop(request, None)
        return before - len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class PriorityRequestQueue(RequestQueue):
    """A heap by (priority, arrival time, id): putting back and adding are the same.

    What is removed stays in the heap as a remnant until it comes to the top, or until
    remnants are the larger part.
    """

    def __init__(self) -> None:
        # Each with the number of its entry: one that came back has two entries.
        self._heap: list[tuple[Request, int]] = []
        self._entries: dict[Request, int] = {}
        self._numbers = itertools.count()

    def add_request(self, request: Request) -> None:
        number = self._entries[request] = next(self._numbers)
        heapq.heappush(self._heap, (request, number))

    def pop_request(self) -> Request:
        request = self.peek_request()
        heapq.heappop(self._heap)
        del self._entries[request]
        return request

    def peek_request(self) -> Request:
        while not self._is_here(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0]

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> int:
        before = len(self._entries)
        for request in requests:
            self._entries.pop(request, None)
        if len(self._heap) > 2 * len(self._entries):
            self._heap = list(filter(self._is_here, self._heap))
            heapq.heapify(self._heap)
        return before - len(self._entries)

    def _is_here(self, entry: tuple[Request, int]) -> bool:
        request, number = entry
        return self._entries.get(request) == number

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue of this policy."""
    if policy is SchedulingPolicy.PRIORITY:
        return PriorityRequestQueue()
    return FCFSRequestQueue()
