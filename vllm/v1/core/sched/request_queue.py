"""The order in which waiting requests are taken."""

import heapq
from abc import ABC, abstractmethod
from collections import deque
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

    @abstractmethod
    def remove_request(self, request: Request) -> None:
        """Removes a request. ValueError when it is not here."""

    @abstractmethod
    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Removes those of the requests that are here."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def __bool__(self) -> bool:
        return len(self) > 0


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        self._requests.append(request)

    def pop_request(self) -> Request:
        return self._requests.popleft()

    def peek_request(self) -> Request:
        return self._requests[0]

    def prepend_request(self, request: Request) -> None:
        self._requests.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self._requests.extendleft(reversed(list(requests)))

    def remove_request(self, request: Request) -> None:
        self._requests.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = {id(request) for request in requests}
        self._requests = deque(r for r in self._requests if id(r) not in gone)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class PriorityRequestQueue(RequestQueue):
    """A heap by (priority, arrival time, id): putting back and adding are the same."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def pop_request(self) -> Request:
        return heapq.heappop(self._heap)

    def peek_request(self) -> Request:
        return self._heap[0]

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        self._heap.remove(request)
        heapq.heapify(self._heap)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = {id(request) for request in requests}
        self._heap = [r for r in self._heap if id(r) not in gone]
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))

    def __len__(self) -> int:
        return len(self._heap)


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue of this policy."""
    if policy is SchedulingPolicy.PRIORITY:
        return PriorityRequestQueue()
    return FCFSRequestQueue()
