"""What helps to find letters and to look at one: exact counts, values, parts of a body, kinds, what came of it."""

from __future__ import annotations

from tests.faces.api.conftest import AdminInstallation
from tests.vault.letters import ACT, DLQ, letter


async def test_letters_are_counted_exactly_where_a_search_would_stop(stored: AdminInstallation) -> None:
    many = [letter(str(one).encode(), error_message="rare" if one == 0 else "no") for one in range(21_000)]
    await stored.vault_app.vault.letters.put(many, ACT)
    async with stored.client() as client:
        searched = (await client.get("/admin/letters", params={"queue": DLQ, "error": "ValueError"})).json()
        assert (searched["count"], searched["count_is_exact"]) == (10_000, False)
        for query, count in (
            ({"error": "ValueError"}, 21_000),
            ({"error": "rare"}, 1),
            ({}, 21_000),
            ({"type": "x"}, 0),
        ):
            assert (await client.get("/admin/letters/count", params=query)).json() == {"count": count}, query


async def test_values_of_letters_are_told_with_how_often_they_are_there(stored: AdminInstallation) -> None:
    odd = letter(b"odd", queue="other.dlq", type="pay", reason="expired", headers={"tenant": 7, "région": "x"})
    await stored.vault_app.vault.letters.put([letter(b"1"), letter(b"2", error_type=""), odd], ACT)
    async with stored.client() as client:
        found = (await client.get("/admin/letters/values")).json()
        assert found["looked_at"] == 3
        by_group = found["values"].pop("group")
        assert sorted(by_group.values()) == [1, 1, 1]
        assert sorted(found["groups"].values()) == ["ValueError order", "ValueError pay", "rejected order"]
        assert set(found["groups"]) == set(by_group)
        assert found["values"] == {
            "queue": {DLQ: 2, "other.dlq": 1},
            "type": {"order": 2, "pay": 1},
            "reason": {"rejected": 2, "expired": 1},
            "source_queue": {"orders": 3},
            "error_type": {"ValueError": 2},
            "header": {"tenant": 1, "région": 1},
        }
        one = (await client.get("/admin/letters/values", params={"queue": "other.dlq"})).json()
        assert (one["looked_at"], one["values"]["type"]) == (1, {"pay": 1})
        assert one["values"]["queue"] == {DLQ: 2, "other.dlq": 1}


async def test_a_part_of_a_body_is_those_bytes(stored: AdminInstallation) -> None:
    (number,) = await stored.put(b"0123456789")
    async with stored.client() as client:
        parts: list[tuple[dict[str, int | str], bytes]] = [
            ({}, b"0123456789"),
            ({"skip": 3}, b"3456789"),
            ({"skip": 3, "limit": 4}, b"3456"),
            ({"skip": 9, "limit": 4}, b"9"),
            ({"skip": 10, "limit": 4}, b""),
            ({"limit": 2, "original": "true"}, b"01"),
        ]
        for query, part in parts:
            answer = await client.get(f"/admin/letters/{number}/body", params=query)
            assert (answer.status_code, answer.content) == (200, part), query
        for wrong in ({"skip": -1}, {"limit": 0}):
            assert (await client.get(f"/admin/letters/{number}/body", params=wrong)).status_code == 400
