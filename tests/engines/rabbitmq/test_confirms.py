"""Which answer belongs to which publish: a model broker answers in every way that a real one may."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.message import CONFIRMED, Outcome, OutcomeKind, Outgoing
from holdfast.engines.rabbitmq.publisher import AMBIGUOUS, Confirms, UnknownTag
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire.events import Returned


def returned(sent: Outgoing, *, raw: bytes | None = None) -> Returned:
    raw = sent.properties if raw is None else raw
    return Returned(1, 312, "NO_ROUTE", sent.exchange, sent.routing_key, raw, sent.body)


def message(body: bytes = b"same", key: str = "k", raw: bytes = b"\0\0") -> Outgoing:
    return Outgoing("", key, raw, body)


def kinds(outcomes: list[tuple[Outgoing, Outcome]]) -> list[OutcomeKind]:
    return [outcome.kind for _, outcome in outcomes]


@dataclass
class Fate:
    """What the model broker does with one publish."""

    kind: str  # stored, unroutable, nacked
    body: bytes


fates = st.lists(
    st.builds(Fate, kind=st.sampled_from(["stored", "unroutable", "nacked"]), body=st.sampled_from([b"a", b"b", b"c"])),
    min_size=1,
    max_size=12,
)


class ModelBroker:
    """Returns in publish order, each before its ack; acks and nacks in any order, alone or with `multiple`."""

    def __init__(self, books: Confirms, fates: list[Fate]) -> None:
        self.books = books
        self.fates = fates
        self.sent = [message(fate.body) for fate in fates]
        self.told: dict[int, Outcome] = {}
        self.answered: set[int] = set()

    def tell(self, outcomes: list[tuple[Outgoing, Outcome]]) -> None:
        for sent, outcome in outcomes:
            place = next(i for i, one in enumerate(self.sent) if one is sent)
            assert place not in self.told, "told twice"
            self.told[place] = outcome

    def check(self) -> None:
        """Nobody is told "stored" beyond what the broker has answered as stored, for bytes that are the same."""
        for body in {fate.body for fate in self.fates}:
            places = [i for i, fate in enumerate(self.fates) if fate.body == body]
            stored = sum(self.fates[i].kind == "stored" and i in self.answered for i in places)
            told = sum(self.told.get(i) == CONFIRMED for i in places)
            assert told <= stored


@given(fates=fates, data=st.data())
def test_every_publish_gets_its_own_outcome(fates: list[Fate], data: st.DataObject) -> None:
    books = Confirms()
    broker = ModelBroker(books, fates)
    published = 0
    open_tags: list[int] = []
    while published < len(fates) or open_tags:
        if published < len(fates) and (not open_tags or data.draw(st.booleans())):
            books.sent(broker.sent[published])
            if fates[published].kind == "unroutable":
                books.returned(returned(broker.sent[published]))
            published += 1
            open_tags.append(published)
            continue
        tag = data.draw(st.sampled_from(open_tags))
        nack = fates[tag - 1].kind == "nacked"
        below = [other for other in open_tags if other <= tag]
        multiple = all((fates[other - 1].kind == "nacked") == nack for other in below) and data.draw(st.booleans())
        done = below if multiple else [tag]
        broker.answered.update(other - 1 for other in done)
        open_tags = [other for other in open_tags if other not in done]
        broker.tell(books.answered(tag, multiple=multiple, ack=not nack))
        broker.check()
    assert len(broker.told) == len(fates)
    assert len(books) == 0
    for body in {fate.body for fate in fates}:
        expected = sorted(
            {"stored": "confirmed", "unroutable": "returned", "nacked": "nacked"}[fate.kind]
            for fate in fates
            if fate.body == body
        )
        got = sorted(broker.told[i].kind.value for i, fate in enumerate(fates) if fate.body == body)
        assert got == expected


@given(fates=fates, cut=st.integers(0, 12))
def test_a_lost_channel_leaves_everything_that_was_not_told(fates: list[Fate], cut: int) -> None:
    books = Confirms()
    broker = ModelBroker(books, fates)
    for fate, sent in zip(fates, broker.sent, strict=True):
        books.sent(sent)
        if fate.kind == "unroutable":
            books.returned(returned(sent))
    for tag, fate in list(enumerate(fates, 1))[:cut]:
        broker.tell(books.answered(tag, multiple=False, ack=fate.kind != "nacked"))
    lost = books.lost()
    untold = [sent for place, sent in enumerate(broker.sent) if place not in broker.told]
    assert [id(one) for one in lost] == [id(one) for one in untold]


def test_a_return_finds_its_publish_although_the_ids_are_the_same() -> None:
    books = Confirms()
    same_id = b"\0\x80\1m"
    routed, unroutable = message(b"1", "there", same_id), message(b"1", "nowhere", same_id)
    books.sent(routed)
    books.sent(unroutable)
    books.returned(returned(unroutable))
    assert kinds(books.answered(2, multiple=True, ack=True)) == [OutcomeKind.CONFIRMED, OutcomeKind.RETURNED]


def test_twins_are_told_together_when_both_are_answered() -> None:
    books = Confirms()
    for _ in range(2):
        books.sent(message())
    books.returned(returned(message()))
    assert books.answered(2, multiple=False, ack=True) == []
    assert kinds(books.answered(1, multiple=False, ack=True)) == [OutcomeKind.RETURNED, OutcomeKind.CONFIRMED]


def test_thousands_of_twins_that_all_come_back_take_no_time() -> None:
    books = Confirms()
    for _ in range(20_000):
        books.sent(message())
    for _ in range(20_000):
        books.returned(returned(message()))
    assert set(kinds(books.answered(20_000, multiple=True, ack=True))) == {OutcomeKind.RETURNED}


def test_a_return_that_the_broker_changed_is_found_when_only_one_can_be_meant() -> None:
    books = Confirms()
    books.sent(message(b"1"))
    books.sent(message(b"2"))
    books.returned(returned(message(b"2"), raw=b"changed"))
    assert kinds(books.answered(2, multiple=True, ack=True)) == [OutcomeKind.CONFIRMED, OutcomeKind.RETURNED]


def test_a_broker_that_sorts_the_headers_is_understood() -> None:
    books = Confirms()
    one = properties.encode({"headers": {"b": 1, "a": 2}})
    two = properties.encode({"headers": {"b": 2, "a": 1}})
    books.sent(message(b"1", raw=one))
    books.sent(message(b"1", raw=two))
    books.returned(returned(message(b"1"), raw=properties.encode({"headers": {"a": 1, "b": 2}})))
    assert kinds(books.answered(2, multiple=True, ack=True)) == [OutcomeKind.CONFIRMED, OutcomeKind.RETURNED]


def test_a_return_that_may_be_anybodys_makes_all_of_them_unknown() -> None:
    books = Confirms()
    books.sent(message(b"1", raw=b"\0\0a"))
    books.sent(message(b"1", raw=b"\0\0b"))
    books.sent(message(b"1", "elsewhere"))
    books.returned(returned(message(b"1"), raw=b"changed"))
    assert [outcome for _, outcome in books.answered(3, multiple=True, ack=True)] == [AMBIGUOUS, AMBIGUOUS, CONFIRMED]


def test_an_answer_to_what_was_never_sent_is_not_believed() -> None:
    books = Confirms()
    with pytest.raises(UnknownTag):
        books.answered(1, multiple=False, ack=True)
    with pytest.raises(UnknownTag):
        books.returned(returned(message()))


def test_zero_with_multiple_means_all() -> None:
    books = Confirms()
    books.sent(message(b"1"))
    books.sent(message(b"2"))
    assert kinds(books.answered(0, multiple=True, ack=True)) == [OutcomeKind.CONFIRMED, OutcomeKind.CONFIRMED]
