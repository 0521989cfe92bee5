"""Following the weights: what an engine serves, in which order engines are updated, and what is never served."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.engines.client import EngineClient, WeightsUpdated
from models.engines.protocol import PauseMode
from models.errors import EngineRefused
from tests.stages.engine_rig import core_of
from tests.stages.fleet_rig import Update, before_updates, fleet, hold_updates
from tests.stages.stage_rig import idle, until


async def test_an_engine_is_served_after_its_first_update_and_its_entry_tells_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.engine(0)
        await idle()
        assert not one.served()
        for version in range(4):
            one.weights.publish(version)
            await one.landed(version)
            assert one.labels() == [f"0.{version}"]
            assert one.served()
            assert not core_of(one.servers[0]).paused
            report = one.entry()
            assert (report.engine, report.run_generation, report.version, report.fetching) == (
                "engine-0",
                0,
                version,
                -1,
            )
        assert one.control().updates == 4


async def test_only_the_newest_of_several_announcements_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        one.weights.publish(0)
        one.weights.publish(1)
        await one.engine(0)
        await one.landed(1)
        assert one.control().updates == 1


async def test_an_older_announcement_is_not_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.engine(0)
        old = one.weights.publish(0)
        await one.landed(0)
        one.weights.publish(1)
        await one.landed(1)
        one.weights.announce(old)
        await idle()
        assert one.labels() == ["0.1"]
        assert (one.entry().version, one.entry().fetching) == (1, -1)


@pytest.mark.parametrize("release", ["eval/released", "drain"])
async def test_a_pinned_version_is_held_until_it_is_released(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.engine(0)
        one.weights.publish(1, pinned=True)
        await one.landed(1)
        one.weights.publish(2)
        one.rig.topic.publish("eval/released", b"0")
        await idle()
        assert one.labels() == ["0.1"]
        assert (one.entry().version, one.entry().fetching) == (1, -1), "not even the slot is read"
        one.rig.topic.publish(release, b"1")
        await one.landed(2)
        assert one.labels() == ["0.2"]


async def test_updates_roll_over_the_engines_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving(2)
        loading, go, _ = hold_updates(monkeypatch, one.servers[0].url)
        paused: list[str] = []
        original_pause = EngineClient.pause

        async def pause(client: EngineClient, mode: PauseMode) -> None:
            paused.append(client.base_url)
            await original_pause(client, mode)

        monkeypatch.setattr(EngineClient, "pause", pause)
        one.weights.publish(1)
        await loading.wait()
        await idle()
        assert paused == [one.servers[0].url], "engine-1 goes on while engine-0 stands still"
        assert one.entry(0).fetching == 1
        assert one.entry(1).fetching == -1
        go.set()
        await one.landed(1, engine=1)
        assert one.entry(0).version == 1
        assert paused == [server.url for server in one.servers]


async def test_who_waited_for_its_turn_takes_what_is_newest_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of the version for which it waited is the next that the trainer writes into."""
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving(2)
        loading, go, asked = hold_updates(monkeypatch, one.servers[0].url)
        one.weights.publish(1)
        await loading.wait()
        one.weights.publish(2)
        await idle()
        go.set()
        await one.landed(2)
        await one.landed(2, engine=1)
        loaded = [[update.label for update in asked if update.url == server.url] for server in one.servers]
        assert loaded == [["0.1", "0.2"], ["0.2"]]


async def test_an_engine_does_not_wait_for_one_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving(2)
        await one.servers[0].__aexit__(None, None, None)
        one.rig.lose_engine(0)
        one.weights.publish(1)
        await one.landed(1, engine=1)


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_torn_slot_is_never_served(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        [server] = await one.serving()

        async def tear(update: Update) -> None:
            if when == "during" and update.label == "0.1":
                one.weights.write(2)
                one.weights.write(3)  # into the slot of version 1

        loads = before_updates(monkeypatch, tear)
        first = one.weights.write(1)
        if when == "before":
            one.weights.write(2)
            one.weights.write(3)
        one.weights.announce(first)
        await until(lambda: one.failures() > 0)
        assert one.served() == (when == "before")
        if when == "during":
            assert core_of(server).paused, "the torn weights are loaded, so nothing may run"
        else:
            assert loads == [], "not even loaded: the engine goes on with the weights it has"
            assert not core_of(server).paused
        assert one.entry().version == 0
        one.weights.publish(4)
        await one.landed(4)
        assert one.served()
        assert not core_of(server).paused
        assert one.labels() == ["0.4"]


async def test_bytes_that_are_not_the_announced_ones_are_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving()
        announcement = one.weights.write(1)
        weights = Path(announcement.path) / "model.safetensors"
        with weights.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x55")
        one.weights.announce(announcement)
        await until(lambda: one.failures() > 0)
        assert one.labels() == ["0.0"]
        one.weights.publish(2)
        await one.landed(2)


async def test_an_update_that_the_engine_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.engine(0)

        async def refuse(update: Update) -> None:
            if len(tries) < 3:
                raise EngineRefused(update.url, 400, "no memory just now")

        tries = before_updates(monkeypatch, refuse)
        one.weights.publish(0)
        await one.landed(0)
        assert [update.label for update in tries] == ["0.0"] * 3
        assert one.served()


async def test_an_engine_that_names_other_weights_than_it_was_given_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        server = await one.engine(0)
        original = EngineClient.update_weights_from_disk
        lie = True

        async def update(
            client: EngineClient, path: str, label: str | None, flush_cache: bool = True
        ) -> WeightsUpdated:
            done = await original(client, path, label, flush_cache)
            if lie:
                await core_of(server).relabel("another")
            return done

        monkeypatch.setattr(EngineClient, "update_weights_from_disk", update)
        one.weights.publish(0)
        await until(lambda: core_of(server).label == "another")
        await idle()
        assert not one.served()
        assert one.entry().version == -1
        lie = False
        await one.landed(0)


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True), ("abort", True)])
async def test_the_configured_mode_is_what_the_engine_is_asked_for(
    mode: PauseMode, flush: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    original_pause = EngineClient.pause

    async def update(update: Update) -> None:
        asked.append(update.flush_cache)

    async def pause(client: EngineClient, wanted: PauseMode) -> None:
        asked.append(wanted)
        await original_pause(client, wanted)

    before_updates(monkeypatch, update)
    monkeypatch.setattr(EngineClient, "pause", pause)
    async with fleet(tmp_path, monkeypatch, mode=mode) as one:
        await one.serving()
    assert asked == [mode, flush]


async def test_a_new_address_takes_the_place_of_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving()
        again = await one.engine(0, incarnation=1)
        await until(lambda: core_of(again).label == "0.0")
        await one.landed(0)
        assert (one.entry().incarnation, one.entry().url) == (1, again.url)
        client = one.control().client
        assert client is not None
        assert client.base_url == again.url


async def test_a_stall_is_accounted_for_while_the_engine_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving()
        seen: list[str] = []

        async def look(_: Update) -> None:
            seen.append(one.stage.activity._state())

        before_updates(monkeypatch, look)
        one.weights.publish(1)
        await one.landed(1)
        assert seen == ["stalled"]
        assert one.stage.activity._state() == "starved"
