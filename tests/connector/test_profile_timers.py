"""Timers and stages over devices that a test drives: no synchronisation, every second told once."""

import threading

import pytest

from connector.modules import FakeModule
from connector.stores import at_once
from tiertune_connector import profile
from tiertune_connector.profile.stages import Profiler
from tiertune_connector.profile.timers import PENDING, Timer, wall_timer


class Device:
    """A stream: work and events in the order of their launch, done when the test lets them be."""

    def __init__(self):
        self.launched, self.done, self.capturing = 0.0, 0.0, False
        self.events = 0

    def launch(self, seconds):
        """Work for the device."""
        self.launched += seconds

    def finish(self, upto=None):
        self.done = self.launched if upto is None else upto

    def event(self):
        self.events += 1
        return Event(self)

    def timer(self, _name=None):
        return Timer(self.event, capturing=lambda: self.capturing, stream=lambda: self)


class Event:
    """As torch's: it happens when the device has done all that was launched before it."""

    def __init__(self, device):
        self.device, self.at = device, None

    def record(self, stream=None):
        assert stream is self.device, "an event of another stream"
        assert not self.device.capturing, "an event in a graph"
        self.at = self.device.launched

    def query(self):
        return self.device.done >= self.at

    def elapsed_time(self, end):
        assert self.query(), "would wait"
        assert end.query(), "would wait"
        return (end.at - self.at) * 1e3


@pytest.fixture
def device():
    return Device()


class TestTimer:
    def test_seconds_are_told_when_the_device_has_come_past(self, device):
        """Each measurement once, under its key, without waiting for the device."""
        timer = device.timer()
        for step, seconds in ((1, 0.5), (2, 0.25)):
            mark = timer.start(step)
            device.launch(seconds)
            timer.stop(mark)
        assert timer.poll() == []
        device.finish(upto=0.5)
        assert timer.poll() == [(1, 0.5)]
        device.finish()
        assert timer.poll() == [(2, 0.25)]
        assert timer.poll() == []

    def test_events_are_used_again(self, device):
        """A thousand steps take the events of those that are under way at once."""
        timer = device.timer()
        for step in range(1000):
            timer.stop(timer.start(step))
            device.finish()
            timer.poll()
        assert device.events == 2

    def test_a_device_that_hangs_does_not_fill_memory(self, device):
        """With too many pending measurements new ones are left out."""
        timer = device.timer()
        device.launch(1.0)
        for step in range(PENDING + 7):
            timer.stop(timer.start(step))
        assert device.events == 2 * PENDING
        device.finish()
        assert [step for step, _ in timer.poll()] == list(range(PENDING))

    def test_a_graph_under_capture_is_left_alone(self, device):
        """No event is recorded into it, from the first or from the second mark."""
        timer = device.timer()
        device.capturing = True
        timer.stop(timer.start(1))
        device.capturing = False
        mark = timer.start(2)
        device.capturing = True
        timer.stop(mark)
        device.finish()
        assert timer.poll() == []

    def test_a_wall_clock_does_the_same_on_the_cpu(self, clock):
        """There what was called is done."""
        timer = wall_timer(clock)
        mark = timer.start("a")
        clock.now += 0.5
        timer.stop(mark)
        assert timer.poll() == [("a", 0.5)]
        assert timer.poll() == []


@pytest.fixture
def profiler(clock, device):
    return Profiler(wall=clock, device_timer=device.timer)


def told(profiler: Profiler) -> dict[str, tuple[float, int]]:
    profiler.harvest()
    return {r.stage: (pytest.approx(r.gpu_seconds), r.tokens) for r in profiler.totals.take()}


def one_token(_args, _kwargs, _output):
    return 1


class TestStages:
    def test_a_module_is_measured_on_its_device(self, profiler, device):
        """Seconds of the device, tokens that the caller's function finds in the call."""
        module = FakeModule(lambda ids, scale: device.launch(0.5) or [ids] * scale, device="cuda:0")
        profiler.stage("talker").attach(module, tokens=lambda args, kwargs, output: args[0] + len(output))
        assert module(7, scale=2) == [7, 7]
        assert told(profiler) == {"talker": (0.0, 9)}, "tokens are known before the device is done"
        device.finish()
        assert told(profiler) == {"talker": (0.5, 0)}

    def test_on_the_cpu_it_is_wall_time(self, profiler, clock):
        """What passed while the module ran, until the hooks are taken off."""

        def work():
            clock.now += 0.5
            return 1

        FakeModule(work)()
        attached = profiler.stage("vocoder").attach(module := FakeModule(work), tokens=one_token)
        module()
        attached.remove()
        module()
        assert told(profiler) == {"vocoder": (0.5, 1)}
        attached.remove()
        assert not module.before
        assert not module.after

    def test_a_module_inside_another_counts_for_both(self, profiler, device):
        """Seconds are those that passed, also of one that calls itself."""
        inner = FakeModule(lambda: device.launch(0.25), device="cuda:0")
        outer = FakeModule(lambda again: (device.launch(0.5), inner(), again and outer(again=False)), device="cuda:0")
        profiler.stage("thinker").attach(outer)
        profiler.stage("talker").attach(inner)
        outer(again=False)
        device.finish()
        assert told(profiler) == {"thinker": (0.75, 0), "talker": (0.25, 0)}
        outer(again=True)
        device.finish()
        assert told(profiler) == {"thinker": (1.5 + 0.75, 0), "talker": (0.5, 0)}

    def test_a_forward_that_raises_counts_with_its_seconds(self, profiler, clock):
        """No tokens; the error goes on, and the stage works as before."""

        def fail():
            clock.now += 0.5
            raise ValueError("bad input")

        module = FakeModule(fail)
        profiler.stage("talker").attach(module, tokens=lambda args, kwargs, output: len(output))
        with pytest.raises(ValueError, match="bad input"):
            module()
        module.forward = lambda: [1, 2]
        module()
        assert told(profiler) == {"talker": (0.5, 2)}

    def test_threads_are_told_apart(self, profiler, clock):
        """Each forward has its own seconds, also of one module that several threads are in at once."""
        entered, leave = threading.Event(), threading.Event()

        def work(waits):
            if waits:
                entered.set()
                assert leave.wait(10)
            else:
                clock.now += 0.5
            return 1

        profiler.stage("a").attach(module := FakeModule(work), tokens=one_token)
        thread = threading.Thread(target=module, args=(True,))
        thread.start()
        assert entered.wait(10)
        module(False)
        clock.now += 0.25
        leave.set()
        thread.join()
        assert told(profiler) == {"a": (0.5 + 0.75, 2)}

    def test_threads_lose_nothing(self, profiler):
        """Many threads through the same stages: all tokens are there."""
        modules = {name: FakeModule(lambda: 1) for name in "ab"}
        for name, module in modules.items():
            profiler.stage(name).attach(module, tokens=one_token)

        def visit(_):
            for _ in range(300):
                for module in modules.values():
                    module()

        at_once(visit, 4)
        assert {name: tokens for name, (_, tokens) in told(profiler).items()} == {"a": 1200, "b": 1200}

    @pytest.mark.parametrize("name", ["", "x" * 65])
    def test_labels_that_no_store_takes_are_refused(self, profiler, name):
        """At once, where they are given."""
        with pytest.raises(ValueError, match="stage"):
            profiler.stage(name)


class TestReporting:
    def test_everything_measured_reaches_the_store(self, profiler, clock):
        """Also what was measured before there was one; what it did not take waits."""

        def work(seconds):
            clock.now += seconds
            return 1

        sink = Taking()
        profiler.stage("talker").attach(module := FakeModule(work), tokens=one_token)
        module(0.5)
        profiler.report_to(sink)
        module(0.25)
        profiler.close()
        assert sum(report.gpu_seconds for report in sink.taken) == pytest.approx(0.75)
        assert sum(report.tokens for report in sink.taken) == 2

    def test_devices_are_asked_in_the_background_only_when_nobody_else_does(self, profiler, device):
        """While stages run, they ask by the way: another thread's question would break a graph under capture."""
        profiler.stage("a").attach(module := FakeModule(lambda: device.launch(0.5), device="cuda:0"))
        module()
        device.finish()
        profiler._harvest_if_idle()
        assert profiler.totals.take() == []
        profiler._harvest_if_idle()
        assert [report.gpu_seconds for report in profiler.totals.take()] == [0.5]

    def test_the_package_has_one_profiler_for_the_process(self):
        """What a user names is ready to be used, before there is a store."""
        profile.stage("only here").attach(module := FakeModule(lambda: 1), tokens=one_token)
        module()
        assert ("only here", 1) in {(report.stage, report.tokens) for report in profile.stage.__self__.totals.take()}


class Taking:
    def __init__(self):
        self.taken = []

    def report_steps(self, steps):
        self.taken += steps
        return True
