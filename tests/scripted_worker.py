"""A stand-in for a device worker: a process that does what its arguments say, one after another.

    python scripted_worker.py STEP ...       its spec comes on standard input, as to a real one

`ready` and `fatal CODE` say so, `noise` is no message, `many N` are N messages, `hear` waits for
a message and says its name as the code of a Fatal, `stop` waits for Stop, `wait` for ever,
`exit N` and `kill` end it once all is sent. It imports little, for tests start many.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import msgpack
import zmq

READY = {
    "op": "ready",
    "endpoint": "",
    "process": {"host": "h", "pid": os.getpid(), "started": 1},
    "layout": {"block_size": 16, "dtype": "uint8", "layers": 1, "kv_heads": 1, "head_dim": 1},
    "blocks": 64,
    "eos_token_ids": [],
}


class Script:
    def __init__(self, endpoint: str, steps: list[str]) -> None:
        self.steps, self.context = steps, zmq.Context()
        self.link = self.context.socket(zmq.PAIR)
        self.link.connect(endpoint)

    def run(self) -> None:
        while self.steps:
            step = getattr(self, self.steps.pop(0))
            step()
        raise AssertionError("a script ends with wait, exit or kill")

    def say(self, message: dict[str, object]) -> None:
        self.link.send(msgpack.packb(message))

    def ready(self) -> None:
        self.say(READY)

    def fatal(self, code: str = "") -> None:
        problem = {"code": code or self.steps.pop(0), "message": "no use"}
        self.say({"op": "fatal", "problem": problem})

    def noise(self) -> None:
        self.link.send(b"\xc1 no message")

    def many(self) -> None:
        for number in range(int(self.steps.pop(0))):
            self.say({"op": "loading", "stage": "weights", "done": number, "total": 1000})

    def hear(self) -> str:
        op = str(msgpack.unpackb(self.link.recv())["op"])
        self.fatal(op)
        return op

    def stop(self) -> None:
        while msgpack.unpackb(self.link.recv())["op"] != "stop":
            pass

    def wait(self) -> None:
        signal.pause()

    def exit(self) -> None:
        self.hang_up()
        os._exit(int(self.steps.pop(0)))

    def kill(self) -> None:
        self.hang_up()
        os.kill(os.getpid(), signal.SIGKILL)

    def hang_up(self) -> None:
        self.link.close(linger=1000)
        self.context.term()


if __name__ == "__main__":
    Script(json.loads(sys.stdin.readline())["endpoint"], sys.argv[1:]).run()
