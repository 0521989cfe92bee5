"""A process that binds with a key of its own: who may connect there, and that nobody can pass for it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from transport import AddressInvalid, DeadLetter, LinkLost, LinkRefused, Node, Security, StreamSpec, zmq_link
from transport.security import KEY_MARK, SERVER, add_client, create_keys, load_security, parse_address, with_serving_key


def ignore(letter: DeadLetter) -> None:
    """Dead letters are not what is tested."""


class Keys:
    """Of a run: the server key, and client keys by name; the hub admits some of them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        create_keys(place / "server", [])
        self.server = load_security(place / "server")
        self.admitted = {self.server.server_public: SERVER}

    def client(self, name: str, *, admitted: bool = True) -> Security:
        public = add_client(self.place / "server", name, self.place / name)
        if admitted:
            self.admitted[public] = name
        return load_security(self.place / name, name)

    def hub(self, name: str) -> Security:
        return with_serving_key(self.client(name), lambda: self.admitted)


@pytest.fixture
def keys() -> Iterator[Keys]:
    with tempfile.TemporaryDirectory(prefix="k") as directory:
        yield Keys(Path(directory))


def spec(port: int = 0) -> StreamSpec:
    stages = {"producers": frozenset({"generate", "prompts"}), "consumers": frozenset({"reward"})}
    return StreamSpec("s", f"tcp://127.0.0.1:{port}", **stages)


async def test_its_own_key_is_in_its_address_and_in_no_file(keys: Keys) -> None:
    async with Node("run", "hub-0", keys.hub("hub-0")) as node:
        first, second = [(await node.hub(spec(), ignore)).address for _ in range(2)]
        key = parse_address(first).key
        assert key == parse_address(second).key
        known = {load_security(keys.place / "hub-0", "hub-0").own.public, keys.server.server_public}
        assert key not in known
        assert not any(key in path.read_text() for path in keys.place.rglob("*.*"))


async def test_who_is_told_may_connect_in_its_role_and_nobody_else(keys: Keys) -> None:
    async with asyncio.timeout(20), Node("run", "hub-0", keys.hub("hub-0")) as node:
        hub = await node.hub(spec(), ignore)
        async with Node("run", "generate-0", keys.client("generate-0")) as sender:
            await (await sender.outlet(hub.address, "s", bytes)).send(b"x", "1")
        async with Node("run", "controller", keys.server) as controller:
            await (await controller.outlet(hub.address, "s", bytes, replica="prompts-0")).send(b"x", "2")
        async with Node("run", "reward-0", keys.client("reward-0")) as taker:
            assert await (await taker.inlet(hub.address, "s", bytes)).receive() is not None
            with pytest.raises(LinkRefused, match="'reward-0' is no producer of stream 's'"):
                await taker.outlet(hub.address, "s", bytes)
        group = keys.client("group-0")
        async with Node("run", "group-0", group) as other:
            with pytest.raises(LinkRefused, match="'group-0' is no consumer of stream 's'"):
                await other.inlet(hub.address, "s", bytes)
        async with Node("run", "reward-1", group, give_up_s=0.3) as liar:
            with pytest.raises(LinkLost, match=r"heard nothing for give_up_s=0\.3"):
                await liar.inlet(hub.address, "s", bytes)
        create_keys(keys.place / "made", ["reward-0"])  # a stranger's own
        made = load_security(keys.place / "made", "reward-0")
        for stranger in (Security(made.own, keys.server.server_public), None):
            async with Node("run", "reward-0", stranger, give_up_s=0.3) as intruder:
                with pytest.raises(LinkLost, match=r"heard nothing for give_up_s=0\.3"):
                    await intruder.inlet(hub.address, "s", bytes)
        assert hub.stats().accepted == 2


async def test_a_process_that_is_told_of_late_is_not_refused(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_link, "HANDSHAKE_MS", 200)  # after which it tries again
    async with asyncio.timeout(20), Node("run", "hub-0", keys.hub("hub-0")) as node, asyncio.TaskGroup() as tasks:
        asked = asyncio.Event()
        admitted = keys.admitted

        class Admitted(dict[str, str]):
            def get(self, key: str, default: str = "") -> str:  # type: ignore[override]
                asked.set()
                return admitted.get(key, default)

        keys.admitted = Admitted()
        hub = await node.hub(spec(), ignore)
        late = keys.client("generate-1", admitted=False)
        async with Node("run", "generate-1", late) as sender:
            opening = tasks.create_task(sender.outlet(hub.address, "s", bytes))
            await asked.wait()
            admitted[late.own.public] = "generate-1"
            await (await opening).send(b"x", "1")
        assert hub.stats().accepted == 1


async def test_peers_connect_to_no_impostor(keys: Keys) -> None:
    own = keys.client("generate-0")
    async with asyncio.timeout(20):
        async with Node("run", "hub-0", keys.hub("hub-0")) as node:
            address = (await node.hub(spec(), ignore)).address
        async with Node("run", "hub-1", keys.hub("hub-1")) as node:
            hub = await node.hub(spec(), ignore)
            impostor = hub.address.partition(KEY_MARK)[0]  # it cannot prove that it owns the key that is asked for
            for key in (f"{KEY_MARK}{parse_address(address).key}", ""):
                async with Node("run", "generate-0", own, give_up_s=0.3) as deceived:
                    with pytest.raises(LinkLost, match="heard nothing"):
                        await deceived.outlet(impostor + key, "s", bytes)


def test_a_key_of_an_address_is_whole() -> None:
    with pytest.raises(AddressInvalid, match="names a key of 3 characters, a Z85 key has 40"):
        parse_address("tcp://10.0.0.1:5000|abc")
    address = parse_address(f"tcp://[::1]:5000|{'a' * 40}")
    assert (str(address), address.key) == ("tcp://[::1]:5000", "a" * 40)
