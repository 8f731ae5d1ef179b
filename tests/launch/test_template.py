"""Workers that are forked from a template process are what new Python processes would be, and end as these do."""

import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from patchpar.errors import LaunchError, WorkerDied
from patchpar.launch import fork_request, templates
from patchpar.launch import template as template_module
from patchpar.launch.fork_request import TemplateEnded
from patchpar.launch.local import LocalExecutor
from patchpar.launch.start_method import resolve_start_method
from patchpar.launch.started_process import FreshProcess, ProcessRequest
from patchpar.launch.template_key import TemplateKey
from patchpar.launch.template_process import ForkedChild, TemplateProcess, assign_descriptors, open_descriptors
from tests.breadth import first_of
from tests.launch.conftest import PLAIN, all_gone, is_running
from tests.launch.test_lifetime import Script

METHODS = ["forkserver", "spawn"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@pytest.fixture
def own(monkeypatch):
    """Templates of this test alone."""
    found = templates.Templates()
    monkeypatch.setattr(templates, "TEMPLATES", found)
    yield found
    for template in list(found._found.values()):
        template.retire()


def pids_of(found):
    return [template.pid for template in found._found.values()]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that workers import: (its name, how often it has been imported)."""
    name, marks = f"imported_by_{tmp_path.name}", tmp_path / "marks"
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source=""):
        text = f"import os\nwith open({str(marks)!r}, 'a') as file:\n    file.write('x')\n{source}\n"
        (tmp_path / f"{name}.py").write_text(text)
        return name, lambda: len(marks.read_text()) if marks.exists() else 0

    return write


@pytest.mark.parametrize(
    ("ranks", "preload"), [(1, ()), pytest.param(2, ("patchpar.pipeline.runner",), marks=pytest.mark.breadth)]
)
def test_a_worker_is_the_same_both_ways(own, tmp_path, monkeypatch, ranks, preload):
    """What a process inherits from its caller, what the caller passes on, and what Python makes of both."""
    found, before = [], Path.cwd()
    for method in METHODS:
        with LocalExecutor(["cpu"] * ranks, PLAIN, preload=preload, start_method=method) as executor:
            executor.call("rank")
            monkeypatch.chdir(tmp_path)  # after a template has been started elsewhere
            with LocalExecutor(["cpu"] * ranks, PLAIN, preload=preload, start_method=method) as second:
                found.append(second.call("variables")[-1])
        monkeypatch.chdir(before)
    forked, new = found
    assert len(pids_of(own)) == 1
    assert forked["leads"] == [True]
    assert forked["folder"] == str(tmp_path)
    assert len(forked["descriptors"]) > 5
    assert {name: value for name, value in forked.items() if value != new[name]} == {}


def of_now(*path, **variables):
    """The key of the template of a worker that is started now."""
    return TemplateKey.of(ProcessRequest(channel=0, output=1, inherit=(), environment=variables, path=path, modules=()))


def test_a_worker_whose_variables_or_modules_are_others_has_another_template(monkeypatch, tmp_path):
    known = of_now("/one", "/two", NAME="1")
    assert of_now("/one", "/two", NAME="1", PYTEST_CURRENT_TEST="another") == known
    assert known not in (of_now("/two", "/one", NAME="1"), of_now("/one", "/two", NAME="2"), of_now("/one", "/two"))
    here = of_now("/one", "packages")
    monkeypatch.chdir(tmp_path)
    assert of_now("/one", "/two", NAME="1") == known, "no module is looked for in the working directory"
    assert of_now("/one", "packages") != here
    monkeypatch.setattr(sys, "executable", "/another/python")
    assert of_now("/one", "/two", NAME="1") != known


@pytest.mark.parametrize("setting", ["files", "signals", "umask"])
def test_a_worker_of_other_settings_has_another_template(setting):
    """Those that a process hands on to its children."""
    known, (soft, hard) = of_now(), resource.getrlimit(resource.RLIMIT_NOFILE)
    before, mask = signal.getsignal(signal.SIGUSR2), os.umask(0o022)
    os.umask(mask)
    try:
        if setting == "files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        elif setting == "signals":
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        else:
            os.umask(mask ^ 0o020)
        assert of_now() != known
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        signal.signal(signal.SIGUSR2, before)
        os.umask(mask)
    assert of_now() == known


def test_what_a_worker_takes_over_is_that_of_its_start(own, monkeypatch):
    """A variable, the cores and the umask of now, not those of when the template was started."""
    seen = []
    for value in ("1", "2"):
        monkeypatch.setenv("READ_BY_IMPORTS", value)
        before = os.umask(int(value))
        try:
            with LocalExecutor(["cpu"], PLAIN, start_method="forkserver") as executor:
                found = executor.call("variables")[0]
                seen.append((found["environment"]["READ_BY_IMPORTS"], found["status"][0]))
        finally:
            os.umask(before)
    assert seen == [("1", "Umask:\t0001"), ("2", "Umask:\t0002")]
    assert len(pids_of(own)) == 2


@pytest.mark.parametrize("method", METHODS)
def test_paths_that_are_no_text_are_passed_over_as_python_does(monkeypatch, tmp_path, method):
    """As scripts write them: sys.path.insert(0, Path(__file__).parent)."""
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    with LocalExecutor(["cpu"], PLAIN, start_method=method) as executor:
        assert executor.call("rank") == [0]


@pytest.mark.parametrize("method", METHODS)
def test_files_of_the_working_directory_are_no_modules(own, monkeypatch, tmp_path, method):
    """As for the installed command, whose own path does not have it: there a file may be called types.py."""
    (tmp_path / "types.py").write_text("raise ImportError('of the working directory')")
    monkeypatch.chdir(tmp_path)
    with LocalExecutor(["cpu"], PLAIN, start_method=method) as executor:
        assert executor.call("rank") == [0]


@pytest.mark.parametrize("method", first_of(METHODS, "forkserver"))
def test_generators_of_workers_are_seeded_as_in_new_processes(method):
    with LocalExecutor(["cpu"] * 2, PLAIN, start_method=method) as executor:
        first, second = executor.call("sample")
    assert all(one != other for one, other in zip(first, second, strict=True)), "Python's, numpy's and torch's"


def test_modules_are_imported_once_for_all_workers(own, module):
    """Counted, also for workers that replace dead ones. New processes import them each."""
    name, imports = module()
    for method, number in (("forkserver", 1), ("spawn", 3)):
        with LocalExecutor(["cpu"], PLAIN, preload=[name], start_method=method) as executor:
            executor.call("rank")
            with pytest.raises(WorkerDied):
                executor.call("crash", 0, "SIGKILL")
            assert executor.call("rank") == [0]
        assert imports() == number


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("how", "says"),
    [("exit", "ended with exit code 7"), ("SIGKILL", r"killed by SIGKILL \(perhaps"), ("SIGTERM", "SIGTERM")],
)
def test_how_a_worker_ended_is_known(method, how, says):
    with LocalExecutor(["cpu"], PLAIN, start_method=method) as executor:
        executor.call("rank")
        with pytest.raises(WorkerDied, match=rf"rank 0 \(cpu, pid \d+\) .*{says}(?s:.*)my last words"):
            executor.call("crash", 0, how)


def test_how_a_worker_ended_is_known_while_its_template_imports(own, module):
    name, imports = module("import time\ntime.sleep(600)")
    with LocalExecutor(["cpu"], PLAIN) as first, LocalExecutor(["cpu"], PLAIN, preload=[name]) as second:
        pids = first.call("rank") and first.pids
        second.start()
        while not imports():
            time.sleep(0.01)
        with pytest.raises(WorkerDied, match="ended with exit code 7"):
            first.call("crash", 0, "exit")
    assert all_gone(pids)


def test_workers_outlive_a_killed_template(own):
    with LocalExecutor(["cpu"], PLAIN) as executor:
        [child] = executor.call("start_child")
        pids, (template,) = executor.pids, pids_of(own)
        os.kill(template, signal.SIGKILL)
        assert all_gone([template])
        assert executor.call("rank") == [0]
        assert executor.pids == pids
        with pytest.raises(
            WorkerDied, match=rf"it is unknown how, because its template process \(pid {template}\) was"
        ):
            executor.call("crash", 0, "exit")
        assert all_gone([*pids, child])
        assert executor.call("rank") == [0]
        assert pids_of(own) != [template]


def test_a_template_that_ends_while_it_imports_is_said(own, module):
    name, _ = module("import sys\nsys.stderr.write('these are its last words\\n')\nos._exit(3)")
    with (
        LocalExecutor(["cpu"], PLAIN, preload=[name]) as executor,
        pytest.raises(
            LaunchError, match=r"(?s)rank 0 .*template process \(pid \d+\) ended with exit code 3.*last words"
        ),
    ):
        executor.call("rank")


def test_a_start_that_is_given_up_leaves_nothing(own, module):
    name, imports = module("import time\ntime.sleep(600)")
    with LocalExecutor(["cpu"] * 2, PLAIN, preload=[name]) as executor:
        executor.start()
        while not imports():
            time.sleep(0.01)
        pids = pids_of(own)
    assert all_gone(pids)
    with LocalExecutor(["cpu"], PLAIN) as executor:  # nor does the next one wait for that import
        assert executor.call("rank") == [0]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "1 threads"),
        ("kept = open('/dev/zero')", "1 descriptors open: /dev/zero"),
    ],
    ids=["a thread", "a descriptor"],
)
def test_what_no_fork_would_copy_makes_workers_new_processes(own, module, caplog, source, says):
    name, imports = module(source)
    with caplog.at_level(logging.WARNING), LocalExecutor(["cpu"], PLAIN, preload=[name]) as executor:
        found = executor.call("variables")[0]
        assert executor.call("rank") == [0]
    assert imports() == 2, "by the template and by the worker"
    assert says in caplog.text
    assert found["leads"] == [True]


def test_an_idle_template_ends_and_the_next_worker_gets_another(monkeypatch):
    own = templates.Templates(idle_seconds=1)
    monkeypatch.setattr(templates, "TEMPLATES", own)
    before = open_descriptors()
    with LocalExecutor(["cpu"], PLAIN) as executor:
        executor.call("rank")
        [first] = pids_of(own)
        executor.call("sleep", 1.2)
        assert is_running(first), "it has a worker"
    assert all_gone([first])
    give_up = time.monotonic() + 20
    while not open_descriptors() <= before and time.monotonic() < give_up:
        time.sleep(0.01)
    assert open_descriptors() <= before
    with LocalExecutor(["cpu"], PLAIN) as executor:
        assert executor.call("rank") == [0]
    assert all_gone(pids_of(own))


def test_a_template_ends_without_a_word(monkeypatch, module, capfd):
    """Also where a library counts what is left when Python ends, as Triton does. Handlers of `atexit` run."""
    own = templates.Templates(idle_seconds=0)
    monkeypatch.setattr(templates, "TEMPLATES", own)
    name, _ = module("import atexit, sys\natexit.register(print, 'handler of atexit', file=sys.stderr)")
    with LocalExecutor(["cpu"], PLAIN, preload=[name, "triton"]) as executor:
        executor.call("rank")
    assert all_gone(pids_of(own))
    assert capfd.readouterr() == ("", "handler of atexit\n")


def test_few_templates_stay_without_workers(monkeypatch):
    own = templates.Templates(idle_templates=1)
    monkeypatch.setattr(templates, "TEMPLATES", own)
    started = []
    for value in ("1", "2", "3"):
        monkeypatch.setenv("READ_BY_IMPORTS", value)
        with LocalExecutor(["cpu"], PLAIN) as executor:
            executor.call("rank")
            started.append(pids_of(own)[-1])
    assert all_gone(started[:1])
    assert all(map(is_running, started[1:]))
    for template in own._found.values():
        template.retire()
    assert all_gone(started)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=lambda end: end.name)
def test_a_template_ends_with_its_caller(end):
    """Also one that a forked child of the caller has copies of, and while it imports."""
    script = Script(
        """
        from patchpar.launch.templates import TEMPLATES
        pool.call("rank")
        slow = LocalExecutor(["cpu"], "tests.launch.plain:PlainEngine", preload=["tests.launch.slow_module"])
        slow.start()
        child = os.fork()
        if child == 0:
            time.sleep(600)
        tell("pids", child)
        tell("pids", *(template.pid for template in TEMPLATES._found.values()), *pool.pids)
        time.sleep(600)
        """
    )
    [child] = script.pids()
    pids = script.pids()
    try:
        script.process.send_signal(end)
        assert all_gone(pids)
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)
        script.ends()


@pytest.mark.parametrize(
    "wanted", [{1: "a", 5: "b"}, {5: "b", 6: "a"}, {7: "a", 5: "c", 6: "b"}, {40: "a", 1: "a", 2: "a", 6: "c"}]
)
def test_descriptors_get_their_numbers_and_no_others_stay(tmp_path, wanted):
    """In a child, where the files a, b and c are open as 5, 6 and 7."""
    for name in "abc":
        (tmp_path / name).touch()
    child = os.fork()
    if child == 0:
        opened = {name: os.open(tmp_path / name, os.O_RDONLY) for name in "abc"}
        for number, name in enumerate("abc", 105):
            os.dup2(opened[name], number)
        os.closerange(3, 100)
        for number in (5, 6, 7):
            os.dup2(number + 100, number)
        os.closerange(100, 200)
        sources = {"a": 5, "b": 6, "c": 7}
        assign_descriptors({number: sources[name] for number, name in wanted.items()})
        got = {number: Path(f"/proc/self/fd/{number}").readlink().name for number in open_descriptors() - {0}}
        os._exit(0 if got == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_template_keeps_nothing_of_the_workers_that_it_forks(own, module, caplog):
    """Their ends of connections, which would stay open when they have ended. What it has of them is no import's."""
    name, imports = module()

    def descriptors(wanted):
        folder, give_up = Path(f"/proc/{pids_of(own)[0]}/fd"), time.monotonic() + 20
        while (found := len(list(folder.iterdir()))) != wanted and time.monotonic() < give_up:
            time.sleep(0.01)
        return found

    with LocalExecutor(["cpu"], PLAIN) as first:
        first.call("rank")
        wanted = len(["stdin", "stdout", "stderr", "requests", "lifeline", "report"])
        assert descriptors(wanted) == wanted
        with caplog.at_level(logging.WARNING), LocalExecutor(["cpu"] * 2, PLAIN, preload=[name]) as others:
            others.call("rank")
            assert descriptors(wanted + 2) == wanted + 2, "two more reports"
        assert descriptors(wanted) == wanted
    assert descriptors(wanted - 1) == wanted - 1
    assert imports() == 1
    assert caplog.text == ""


def test_a_worker_is_not_reaped_while_it_is_killed(monkeypatch):
    """It may end at the first signal: the second would go to whoever has its id by then, or end the template."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        ours, report = fork_request.report_sockets()
        worker, kill_group = ForkedChild(process.pid, report), os.killpg

        def kill_and_wait(pid, number):
            kill_group(pid, number)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        monkeypatch.setattr(os, "killpg", kill_and_wait)
        before = signal.signal(signal.SIGCHLD, lambda *_: worker.look())
        try:
            worker.let_go()
        finally:
            signal.signal(signal.SIGCHLD, before)
            ours.close()
    assert worker.is_reaped
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)


def test_which_way_workers_start_and_why(monkeypatch):
    assert resolve_start_method("auto", ["cpu"]).name == "forkserver"
    found = resolve_start_method("auto", ["cuda:0", "cuda:1"])
    assert found.name == "spawn"
    assert "GPUs" in found.note
    assert resolve_start_method("spawn", ["cpu"]).name == "spawn"
    with pytest.raises(LaunchError, match=r"'forkserver' is not possible: drivers of GPUs.*use 'auto' or 'spawn'"):
        resolve_start_method("forkserver", ["cuda:0"])

    def refuses(_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuses)
    assert "Operation not permitted" in resolve_start_method("auto", ["cpu"]).note
    with LocalExecutor(["cpu"], PLAIN) as executor:
        assert executor.start_method.name == "spawn"
        assert executor.call("rank") == [0]


def test_a_template_that_is_retired_while_it_is_asked_for_a_worker_stays_for_it(monkeypatch):
    """Another pool of this process has given up a worker that did not exist yet."""
    found = template_module.Template.__new__(template_module.Template)
    requests, end = socket.socketpair()
    found._users, found.is_retired = weakref.WeakSet(), False
    found._requests, found._write_life = requests, requests
    monkeypatch.setattr(template_module, "send_request", lambda *_: found.retire())
    request = ProcessRequest(channel=0, output=1, inherit=(), environment={}, path=(), modules=())
    worker = found.fork(request)
    assert requests.fileno() >= 0
    with pytest.raises(TemplateEnded):
        found.fork(request)
    assert requests.fileno() >= 0
    worker.kill()
    assert requests.fileno() < 0, "it has no worker any more"
    end.close()


def test_a_template_finds_the_end_of_a_request_that_was_sent_in_part(monkeypatch):
    """It would wait for the rest, and reap none of the workers that it still has."""
    found = template_module.Template.__new__(template_module.Template)
    (requests, end), (ours, report) = socket.socketpair(), fork_request.report_sockets()
    worker = template_module.ForkedProcess(found, ours)
    found._users, found.is_retired = weakref.WeakSet([worker]), False
    found._requests, found._write_life = requests, report

    def sends_a_part(*_):
        raise TemplateEnded("it has taken no request")

    monkeypatch.setattr(template_module, "send_request", sends_a_part)
    request = ProcessRequest(channel=0, output=1, inherit=(), environment={}, path=(), modules=())
    with end, ours, report:
        end.setblocking(False)
        with pytest.raises(TemplateEnded):
            found.fork(request)
        assert end.recv(1) == b""
        assert report.fileno() >= 0, "it has another worker"


def test_a_template_that_takes_no_requests_is_not_waited_for_for_ever(monkeypatch):
    """It is in an import that does not end, and the requests before this one fill the socket."""
    monkeypatch.setattr(fork_request, "SEND_SECONDS", 0.1)
    requests, end = socket.socketpair()
    request = fork_request.ForkRequest(numbers=(), path=("x" * (4 << 20),), modules=(), environment={})
    with requests, end, ThreadPoolExecutor() as threads:
        sent = threads.submit(fork_request.send_request, requests, request, [])
        try:
            with pytest.raises(TemplateEnded, match="no request"):
                sent.result(20)
        finally:
            end.shutdown(socket.SHUT_RDWR)


def test_a_worker_that_ends_before_it_is_listed_is_reported():
    """The handler of SIGCHLD has not found it."""
    template = TemplateProcess.__new__(TemplateProcess)
    template._children, template._unfit = [], ""
    ours, report = fork_request.report_sockets()
    with ours, report, subprocess.Popen(["false"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        template._adopt(ForkedChild(process.pid, report))
        (started, descriptors), (ended, _) = (fork_request.receive_report(ours) for _ in range(2))
        os.close(descriptors[0])
    assert (started.pid, ended.code) == (process.pid, 1)


def test_a_worker_that_has_ended_is_let_go_when_its_exit_code_is_known(monkeypatch):
    """The template reports it a little later than the kernel."""
    monkeypatch.setattr(template_module, "REPORT_SECONDS", 60.0)
    template = template_module.Template.__new__(template_module.Template)
    template._users, template.is_retired = weakref.WeakSet(), False
    ours, report = fork_request.report_sockets()
    worker = template_module.ForkedProcess(template, ours)
    with report, subprocess.Popen(["false"]) as process:
        pidfd = os.pidfd_open(process.pid)
        fork_request.send_report(report, fork_request.WorkerReport(pid=process.pid), (pidfd,))
        os.close(pidfd)
        while worker.is_alive():
            time.sleep(0.01)
        later = threading.Timer(0.2, fork_request.send_report, (report, fork_request.WorkerReport(code=1)))
        later.start()
        worker.reap()
        later.join()
    assert worker.returncode == 1


def test_a_forked_child_of_the_caller_keeps_nothing_of_a_worker():
    """Or the template would not reap it before that child has ended."""
    ours, report = fork_request.report_sockets()
    worker = template_module.ForkedProcess(template_module.Template.__new__(template_module.Template), ours)
    with report:
        worker.close_in_child()
        assert report.recv(1) == b""


@pytest.mark.parametrize("sent", [300, 3], ids=["all", "the caller ends meanwhile"])
def test_a_request_has_all_of_its_descriptors_or_none(sent):
    """Also more of them than one message takes."""
    before, number = open_descriptors(), 300
    requests, end = socket.socketpair()
    request = fork_request.ForkRequest(numbers=tuple(range(number)), path=(), modules=(), environment={})
    with end, requests:
        if sent == number:
            fork_request.send_request(requests, request, [end.fileno()] * number)
        else:
            data = json.dumps(asdict(request)).encode()
            requests.sendall(fork_request.LENGTHS.pack(len(data), number) + data)
            socket.send_fds(requests, [b"\0"], [end.fileno()] * sent)
            requests.shutdown(socket.SHUT_WR)
        found = fork_request.receive_request(end)
        assert (found is None) == (sent < number)
        if found is not None:
            assert found[0] == request
            assert len(found[1]) == number
            for descriptor in found[1]:
                os.close(descriptor)
    assert open_descriptors() <= before


def test_what_a_worker_has_started_is_killed_though_the_worker_has_just_ended():
    """A signal to it must not reap it: then nobody could be sure whose its process group is."""
    process = FreshProcess.__new__(FreshProcess)
    with subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE, start_new_session=True
    ) as process._popen:
        child = int(process._popen.stdout.readline())
        while process.is_alive():
            time.sleep(0.01)
        process.terminate()
        process.dump_stack()
        process.kill()
    assert all_gone([child])
