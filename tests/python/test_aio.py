"""kvstow.aio: the same answers, and the loop runs on meanwhile."""

import asyncio
import signal
import time

import pytest
from conftest import same

import kvstow
import kvstow.aio


def test_round_trip(daemon, kv):
    async def main():
        async with kvstow.aio.Client(daemon.target) as client:
            model = await client.register_model(kv.spec)
            async with await client.put_session(model, kv.tokens, codec="raw") as session:
                for i, (k, v) in enumerate(kv.layers):
                    await session.put_layer(i, k, v)
            assert session.result.num_stored == 4
            found = await client.lookup(model, kv.tokens)
            got_layers = kv.empty_layers()
            async with await client.lease(found.keys) as lease:
                assert lease.held == [True] * 4
                got = await client.get(model, found.leading_keys, got_layers)
            assert got.num_leading == 4 and same(got_layers, kv.layers)
            assert [block.key async for block in client.list_blocks(page_size=1)] == sorted(
                found.keys
            )
            assert (await client.stat()).num_blocks == 4
            assert await client.delete(found.keys) == 4
            with pytest.raises(ZeroDivisionError):
                async with await client.put_session(model, kv.tokens) as session:
                    raise ZeroDivisionError
            assert (await client.stat()).open_tickets == 0

    asyncio.run(main())


def test_the_loop_runs_while_calls_wait(daemon, kv):
    async def main():
        async with kvstow.aio.Client(daemon.target, control_timeout=1, breaker_errors=99) as client:
            await client.register_model(kv.spec)
            daemon.stop_all_threads()
            start = time.monotonic()
            calls = [asyncio.create_task(client.stat()) for _ in range(4)]
            turns = 0
            while not all(call.done() for call in calls):
                await asyncio.sleep(0)
                turns += 1
            daemon.signal(signal.SIGCONT)
            assert time.monotonic() - start < 3 and turns > 100
            for call in calls:
                with pytest.raises(kvstow.DeadlineExceededError):
                    call.result()

    asyncio.run(main())


def test_it_has_every_method_of_the_client():
    missing = {
        name
        for name in dir(kvstow.Client)
        if not name.startswith("_") and not hasattr(kvstow.aio.Client, name)
    }
    assert missing == set()
