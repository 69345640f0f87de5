# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server that takes part in its own drain. Python 3.11 or later, and nothing else.

usage: app.py [HOST] PORT

GET /           an answer
GET /ready      200, and 503 while it drains
GET /job?s=8    begins a job of so many seconds in the background, which a flush waits for; 409 if it is too late

The protocol is docs/protocol.md. Without an agent it serves, and ends at SIGTERM when its jobs are done.
"""

import datetime
import http.client
import http.server
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import urllib.parse

SOCKET = os.environ.get("EBB_APP_SOCKET") or "/run/ebb/app.sock"


def log(*words):
    print(*words, flush=True)


def seconds(rfc3339):
    return datetime.datetime.fromisoformat(rfc3339).timestamp()


class UnixConnection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(SOCKET)


class Problem(Exception):
    """An answer other than success. The kind is the end of its type."""

    def __init__(self, answer):
        try:
            problem = json.loads(answer.read())
        except ValueError:
            problem = {}
        self.kind = problem.get("type", "").rpartition(":")[2]
        super().__init__(problem.get("detail") or f"status {answer.status}")


# What a request meets while there is no owner, or one that is busy.
AWAY = (OSError, http.client.HTTPException, ValueError, Problem)


class Session:
    """The session of this process. One thread reads its events and calls on_draining(bool) and on_flush(reason)."""

    def __init__(self, on_draining, on_flush):
        self.on_draining, self.on_flush = on_draining, on_flush
        self.id, self.applied = None, 0  # applied is the number of the last event
        self.seen = set()  # (drain, type) of events, for the session after this one
        self.holds = {}  # by id
        self.drain = None  # that was announced
        self.flush_by = None  # when that one flushes at the latest, on our own clock
        self.has_flushed = set()  # drains
        self.heard = 0.0  # the owner's last sign of life
        self.beat, self.lost = 3.0, 15.0
        self.lock = threading.RLock()  # for one flush
        self.flushed, self.over = threading.Event(), threading.Event()
        for loop in (self.follow, self.heartbeats):
            threading.Thread(target=loop, daemon=True).start()

    def call(self, method, path, body=None):
        conn = UnixConnection("ebb", timeout=5)
        try:
            headers = {"Content-Type": "application/json"}
            if self.id:
                headers["Ebb-Session"] = self.id
            conn.request(method, "/v1/session" + path, json.dumps(body or {}), headers)
            answer = conn.getresponse()
            if answer.status >= 300:
                raise Problem(answer)
            return json.loads(answer.read() or "null")
        finally:
            conn.close()

    def register(self):
        self.id, self.applied = None, 0
        self.id = self.call("POST", "", {"bound": True})["session"]
        log("session", self.id)
        for hold in list(self.holds.values()):
            self.call("POST", "/hold", hold)

    def follow(self):
        pause = 0.0
        while not self.over.is_set():
            before, end = self.heard, "transient"
            try:
                if not self.id:
                    self.register()
                end = self.stream()
            except Problem as p:
                if p.kind == "unknown-session":
                    self.id, end = None, "gone"
            except AWAY:
                end = "broken"
            if end == "evicted":
                self.over.set()  # this generation is over: never again
            # At once when it was there until now, else after 1 s, doubling to 30 s.
            if self.heard > before and end != "transient":
                pause = 0.0
            else:
                pause = min(2 * pause, 30.0) if pause else 1.0
            self.over.wait(pause * random.uniform(0.5, 1))

    def stream(self):
        """Applies events until the stream ends, and returns the reason that it gave."""
        conn = UnixConnection("ebb", timeout=self.lost)
        try:
            conn.request("GET", "/v1/session/events", headers={"Ebb-Session": self.id})
            answer = conn.getresponse()
            if answer.status != 200:
                raise Problem(answer)
            kind = data = ""
            for line in answer:
                self.heard = time.monotonic()  # a beat too
                field, _, value = line.decode().strip().partition(": ")
                if field == "event":
                    kind = value
                elif field == "data":
                    data = value
                elif not field and data:
                    event = json.loads(data)
                    if kind == "session":
                        self.beat, self.lost = event["heartbeat_ms"] / 1000, event["lost_ms"] / 1000
                    if event.get("seq") and kind != "session":
                        self.apply(kind, event)
                    if kind == "end":
                        return event["reason"]
                    kind = data = ""
            return "broken"
        finally:
            conn.close()

    def apply(self, kind, event):
        if event["seq"] > self.applied:
            once = (event.get("drain"), kind)
            if kind == "deadline" or once not in self.seen:
                self.seen.add(once)
                self.act(kind, event)
            self.applied = event["seq"]
        if kind == "flush":  # a repeated one is answered too: the first answer may be lost
            try:
                self.call("POST", "/flushed", {"drain": event["drain"]})
            except AWAY as e:
                log("not answered:", e)
            self.flushed.set()
        self.call("POST", "/ack", {"seq": self.applied})

    def act(self, kind, event):
        if kind in ("draining", "deadline"):
            # The owner's clock need not be ours: what is left counts.
            after_flush = seconds(event["deadline"]) - seconds(event["flush_by"])
            self.flush_by = time.monotonic() + event["time_left_ms"] / 1000 - after_flush
        if kind == "draining":
            self.drain = event["drain"]
            log("draining", event["cause"])
            self.on_draining(True)
        elif kind == "cancelled":
            self.drain = self.flush_by = None
            log("cancelled")
            self.on_draining(False)
        elif kind == "flush":
            self.flush(event["drain"], event["reason"])

    def flush(self, drain, reason):
        with self.lock:
            if drain in self.has_flushed:
                return
            self.has_flushed.add(drain)
            log("flush", reason)
            self.on_flush(reason)

    def heartbeats(self):
        while not self.over.wait(self.beat):
            # Alone, an announced drain keeps its time.
            if self.flush_by and time.monotonic() > max(self.flush_by, self.heard + self.lost):
                self.flush(self.drain, "deadline")
                self.flushed.set()
            try:
                # What could not be said while the owner was away is said now.
                there = {h["id"] for h in self.call("POST", "/heartbeat", {"remaining": len(self.holds)})["holds"]}
                for hold in list(self.holds.values()):
                    if hold["id"] not in there:
                        self.call("POST", "/hold", hold)
                for hold in there - set(self.holds):
                    self.call("POST", "/release", {"id": hold})
            except AWAY:
                pass  # the other thread sees to it

    def hold(self, name):
        """Holds the flush until the function that it returns is called. None: the flush has begun, it is too late."""
        hold = {"id": f"{name}-{random.getrandbits(64):x}", "name": name}
        if self.has_flushed:
            return None
        self.holds[hold["id"]] = hold
        try:
            self.call("POST", "/hold", hold)
        except AWAY as e:
            if getattr(e, "kind", "") == "flush-has-begun":
                del self.holds[hold["id"]]
                return None

        def release():
            del self.holds[hold["id"]]
            try:
                self.call("POST", "/release", hold)
            except AWAY:
                pass  # with the next heartbeat

        return release

    def end(self):
        """Says goodbye, so that nothing is thought of the silence that follows."""
        if self.over.is_set():
            return
        self.over.set()
        try:
            self.call("DELETE", "")
        except AWAY:
            pass


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        if url.path == "/ready":
            return self.answer(503, "draining\n") if draining.is_set() else self.answer(200, "ready\n")
        if url.path != "/job":
            return self.answer(200, "hello from python\n")
        release = session.hold("job")
        if release is None:
            return self.answer(409, "too late\n")
        took = float(urllib.parse.parse_qs(url.query).get("s", ["8"])[0])
        threading.Timer(took, lambda: (log("job done"), release())).start()
        self.answer(202, "begun\n")

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # server_close waits for the last answer


draining, stop = threading.Event(), threading.Event()
server = Server((sys.argv[-2] if len(sys.argv) > 2 else "127.0.0.1", int(sys.argv[-1])), Handler)
session = Session(
    on_draining=lambda yes: draining.set() if yes else draining.clear(),
    on_flush=lambda reason: log("everything is written"),
)
signal.signal(signal.SIGTERM, lambda *_: stop.set())
threading.Thread(target=server.serve_forever, daemon=True).start()
log("listening")
# The flush of the session or the stop signal, which without an agent is all there is: then its jobs are waited for here.
while not session.flushed.is_set() and not (stop.is_set() and not session.holds):
    if stop.wait(0.1):
        draining.set()
        session.flushed.wait(0.1)
session.flush(session.drain, "signal")
server.shutdown()
server.server_close()
session.end()
log("end")
