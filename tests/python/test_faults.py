"""A service that dies, hangs or comes back; forks; signals; memory."""

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest
from conftest import ROOT, eventually, same

import kvstow

SLACK_S = 2.0


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def small_model(client):
    spec = kvstow.ModelSpec.uniform("s", "w", num_layers=1, num_kv_heads=1, head_dim=64)
    return client.register_model(spec)


def test_10000_small_calls_do_not_grow(client):
    model = small_model(client)
    k = numpy.ones((64, 1, 64), "u2")
    back = [(numpy.zeros_like(k), numpy.zeros_like(k))]
    keys = client.put(model, range(64), [(k, k)]).keys

    def calls(count):
        for i in range(count // 5):
            client.lookup(keys)
            client.lookup(model, range(64))
            client.put(model, range(64), [(k, k)])
            with pytest.raises(kvstow.InvalidArgumentError):
                client.get(model, keys, [(k, back[0][1][:, :, ::2])])
            assert client.get(model, keys, back).num_leading == 1

    calls(2000)
    gc.collect()
    before = resident_bytes()
    calls(10000)
    gc.collect()
    grown = resident_bytes() - before
    assert grown < 4 << 20, f"{grown} bytes after 10,000 calls"


def test_u11_a_restart_heals_without_a_new_client(daemon, kv):
    client = kvstow.Client(daemon.target, control_timeout=2, data_timeout=5, breaker_cool_down=0.2)
    model = client.register_model(kv.spec)
    keys = client.put(model, kv.tokens, kv.layers, codec="raw").keys
    daemon.kill()
    for _ in range(8):
        start = time.monotonic()
        with pytest.raises(kvstow.UnavailableError):
            client.get(model, keys, kv.empty_layers())
        assert time.monotonic() - start < 5 + SLACK_S
    assert client.breaker_state == "open"
    daemon.start()
    eventually(lambda: client.register_model(kv.spec))
    assert client.lookup(keys).num_leading == 0  # memory only: gone with the process
    assert client.put(model, kv.tokens, kv.layers, codec="raw").num_stored == 4
    got_layers = kv.empty_layers()
    client.get(model, keys, got_layers)
    assert same(got_layers, kv.layers)


def test_deadlines_hold_while_the_daemon_is_stopped(daemon, kv):
    client = kvstow.Client(daemon.target, control_timeout=0.5, data_timeout=1, breaker_errors=100)
    model = client.register_model(kv.spec)
    keys = client.put(model, kv.tokens, kv.layers, codec="raw").keys
    daemon.stop_all_threads()
    try:
        for call, limit in [
            (lambda: client.lookup(keys), 0.5),
            (lambda: client.stat(), 0.5),
            (lambda: client.ping(0.3), 0.3),
            (lambda: client.get(model, keys, kv.empty_layers()), 1),
            (lambda: client.put(model, kv.tokens, kv.layers, tenant="t"), 1),
        ]:
            start = time.monotonic()
            with pytest.raises((kvstow.DeadlineExceededError, kvstow.UnavailableError)):
                call()
            assert limit * 0.5 < time.monotonic() - start < limit + SLACK_S
    finally:
        daemon.signal(signal.SIGCONT)
    assert client.lookup(keys).num_leading == 4


def test_other_threads_run_while_one_waits(daemon, kv):
    client = kvstow.Client(daemon.target, control_timeout=1, breaker_errors=100)
    client.register_model(kv.spec)
    daemon.stop_all_threads()
    failures = []

    def wait():
        try:
            client.stat()
        except kvstow.Error as error:
            failures.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    turns = 0
    while any(thread.is_alive() for thread in threads):
        turns += 1
        threads[0].join(0.01)
    daemon.signal(signal.SIGCONT)
    # Four waits of a second each, at once; and this thread ran meanwhile.
    assert len(failures) == 4 and time.monotonic() - start < 1 + SLACK_S and turns > 20


INTERRUPTED = """
import sys; sys.path.insert(0, 'tests/python')
import conftest, kvstow, os, signal, threading, time
kv = conftest.Fixture()
client = kvstow.Client({target!r}, data_timeout=20, control_timeout=20)
model = kvstow.Model(kv.spec)
keys = kvstow.block_keys(kv.spec, kv.tokens)
layers = kv.empty_layers()
main = threading.main_thread().ident
def tell():  # once the main thread is in the call
    while not sys._current_frames()[main].f_code.co_filename.endswith('kvstow/client.py'):
        pass
    print('waiting', flush=True)
threading.Thread(target=tell).start()
try:
    {call}
except KeyboardInterrupt:
    print('interrupted', flush=True)
"""


@pytest.mark.parametrize(
    "call",
    ["client.get(model, keys, layers)", "client.stat()", "client.put(model, kv.tokens, kv.layers)"],
)
def test_ctrl_c_ends_a_long_wait(daemon, kv, call):
    daemon.stop_all_threads()
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(target=daemon.target, call=call)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "waiting\n"
    start = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "interrupted\n"
    assert time.monotonic() - start < 1
    # And the process ends at once, although the call is still under way.
    assert child.wait(5) == 0
    daemon.signal(signal.SIGCONT)


def test_an_interrupted_client_goes_on(daemon, kv):
    client = kvstow.Client(daemon.target, data_timeout=20)
    model = client.register_model(kv.spec)
    keys = client.put(model, kv.tokens, kv.layers, codec="raw").keys

    def interrupt(*_):
        raise InterruptedError("by the test")

    old = signal.signal(signal.SIGALRM, interrupt)
    daemon.stop_all_threads()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedError, match="by the test"):
            client.get(model, keys, kv.empty_layers())
    finally:
        signal.signal(signal.SIGALRM, old)
        daemon.signal(signal.SIGCONT)
    got_layers = kv.empty_layers()
    assert client.get(model, keys, got_layers).num_leading == 4
    assert same(got_layers, kv.layers)


def test_after_a_fork_the_child_is_told(client, kv):
    model = client.register_model(kv.spec)
    session = client.put_session(model, kv.tokens)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        said = []
        for call in (
            client.stat,
            lambda: client.put(model, kv.tokens, kv.layers),
            lambda: kvstow.Client("unix:/x.sock"),
            lambda: session.put_layer(0, *kv.layers[0]),
        ):
            try:
                call()
                said.append("nothing")
            except kvstow.FailedPreconditionError as error:
                said.append("forked" if "was forked from process" in str(error) else str(error))
        client.close()
        del session
        said.append(kvstow.block_keys(kv.spec, kv.tokens)[0].hex()[:4])  # needs no connection
        os.write(writer, " ".join(said).encode())
        os._exit(0)
    os.close(writer)
    if not select.select([reader], [], [], 20)[0]:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as pipe:
        said = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0, "the child did not end by itself"
    assert said == ["forked"] * 4 + [kvstow.block_keys(kv.spec, kv.tokens)[0].hex()[:4]]
    session.abort()
    assert client.put(model, kv.tokens, kv.layers).num_stored == 4


def test_a_session_is_one_threads_at_a_time(daemon, kv):
    client = kvstow.Client(daemon.target, data_timeout=1)
    session = client.put_session(client.register_model(kv.spec), kv.tokens, codec="raw")
    daemon.stop_all_threads()
    entered = threading.Event()

    class Slow:
        def __dlpack_device__(self):
            entered.set()
            return (1, 0)

        def __dlpack__(self, **_):
            return kv.layers[0][0].copy().__dlpack__()

    def put():
        try:
            session.put_layer(0, Slow(), kv.layers[0][1])
        except kvstow.Error:
            pass  # its deadline may pass before the daemon goes on

    thread = threading.Thread(target=put)
    thread.start()
    assert entered.wait(10)
    with pytest.raises(kvstow.FailedPreconditionError, match="another thread"):
        session.put_layer(1, *kv.layers[1])
    daemon.signal(signal.SIGCONT)
    thread.join()
    session.abort()
