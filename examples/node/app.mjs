// SPDX-License-Identifier: Apache-2.0

// A small HTTP server that takes part in its own drain. Node 18 or later, and nothing else.
//
// usage: app.mjs [HOST] PORT
//
// GET /           an answer
// GET /ready      200, and 503 while it drains
// GET /job?s=8    begins a job of so many seconds in the background, which a flush waits for; 409 if it is too late
//
// The protocol is docs/protocol.md. Without an agent it serves, and ends at SIGTERM when its jobs are done.

import { randomUUID } from 'node:crypto';
import { EventEmitter, once } from 'node:events';
import http from 'node:http';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';

const socketPath = process.env.EBB_APP_SOCKET || '/run/ebb/app.sock';
const log = (...words) => console.log(...words);
const now = () => performance.now();

async function text(stream) {
  let all = '';
  for await (const part of stream.setEncoding('utf8')) all += part;
  return all;
}

// Problem is an answer other than success. Its kind is the end of its type.
class Problem extends Error {
  static async from(answer) {
    let problem = {};
    try {
      problem = JSON.parse(await text(answer));
    } catch {} // not one of the owner's
    const p = new Problem(problem.detail ?? `status ${answer.statusCode}`);
    p.kind = (problem.type ?? '').split(':').pop();
    return p;
  }
}

// Session is the session of this process. It emits draining (yes or no) and flushed, and awaits onFlush(reason).
class Session extends EventEmitter {
  id; // of the present one
  applied = 0; // the number of its last event
  seen = new Set(); // drain and type of events, for the session after this one
  holds = new Map(); // by id
  drain; // that was announced
  flushBy; // when that one flushes at the latest, on our own clock
  flushing = new Map(); // by drain, the promise of its flush
  heard = -Infinity; // the owner's last sign of life
  beat = 3000;
  lost = 15000;
  over = false;

  constructor(onFlush) {
    super();
    this.onFlush = onFlush;
    this.follow();
    this.heartbeats();
  }

  request(method, path, body, timeout) {
    const headers = { 'Content-Type': 'application/json' };
    if (this.id) headers['Ebb-Session'] = this.id;
    return new Promise((resolve, reject) => {
      const req = http.request({ socketPath, method, path: `/v1/session${path}`, headers, timeout, agent: false });
      req.on('timeout', () => req.destroy(new Error('nothing was heard')));
      req.on('error', reject);
      req.on('response', (answer) => (answer.statusCode < 300 ? resolve(answer) : Problem.from(answer).then(reject, reject)));
      req.end(body);
    });
  }

  async call(method, path, body = {}) {
    const answer = await text(await this.request(method, path, JSON.stringify(body), 5000));
    return answer ? JSON.parse(answer) : undefined;
  }

  async register() {
    this.id = undefined;
    this.applied = 0;
    this.id = (await this.call('POST', '', { bound: true })).session;
    log('session', this.id);
    for (const hold of this.holds.values()) await this.call('POST', '/hold', hold);
  }

  async follow() {
    for (let pause = 0; !this.over; await sleep(pause * (0.5 + Math.random() / 2), undefined, { ref: false })) {
      const before = this.heard;
      let end = 'broken';
      try {
        if (!this.id) await this.register();
        end = await this.stream();
      } catch (e) {
        if (e instanceof Problem) end = 'transient';
        if (e.kind === 'unknown-session') [this.id, end] = [undefined, 'gone'];
      }
      if (end === 'evicted') this.over = true; // this generation is over: never again
      // At once when it was there until now, else after 1 s, doubling to 30 s.
      if (this.heard > before && end !== 'transient') pause = 0;
      else pause = Math.min(2 * pause, 30_000) || 1000;
    }
  }

  // stream applies events until the stream ends, and returns the reason that it gave.
  async stream() {
    const answer = await this.request('GET', '/events', undefined, this.lost);
    try {
      let kind = '';
      let data = '';
      for await (const line of createInterface({ input: answer })) {
        this.heard = now(); // a beat too
        if (line.startsWith('event: ')) kind = line.slice(7);
        else if (line.startsWith('data: ')) data = line.slice(6);
        else if (line === '' && data) {
          const event = JSON.parse(data);
          if (kind === 'session') [this.beat, this.lost] = [event.heartbeat_ms, event.lost_ms];
          else if (event.seq) await this.apply(kind, event);
          if (kind === 'end') return event.reason;
          kind = data = '';
        }
      }
      return 'broken';
    } finally {
      answer.destroy();
    }
  }

  async apply(kind, event) {
    if (event.seq > this.applied) {
      const key = `${event.drain} ${kind}`;
      if (kind === 'deadline' || !this.seen.has(key)) {
        this.seen.add(key);
        await this.act(kind, event);
      }
      this.applied = event.seq;
    }
    if (kind === 'flush') {
      // A repeated one is answered too: the first answer may be lost.
      await this.call('POST', '/flushed', { drain: event.drain }).catch((e) => log('not answered:', e.message));
      this.emit('flushed');
    }
    await this.call('POST', '/ack', { seq: this.applied });
  }

  async act(kind, event) {
    if (kind === 'draining' || kind === 'deadline') {
      // The owner's clock need not be ours: what is left counts.
      this.flushBy = now() + event.time_left_ms - (Date.parse(event.deadline) - Date.parse(event.flush_by));
    }
    if (kind === 'draining') {
      this.drain = event.drain;
      log('draining', event.cause);
      this.emit('draining', true);
    } else if (kind === 'cancelled') {
      this.drain = this.flushBy = undefined;
      log('cancelled');
      this.emit('draining', false);
    } else if (kind === 'flush') {
      await this.flush(event.drain, event.reason);
    }
  }

  // flush flushes once for a drain, and is done when that is.
  flush(drain, reason) {
    if (!this.flushing.has(drain)) {
      log('flush', reason);
      this.flushing.set(drain, Promise.resolve(this.onFlush(reason)));
    }
    return this.flushing.get(drain);
  }

  async heartbeats() {
    for (; !this.over; await sleep(this.beat, undefined, { ref: false })) {
      // Alone, an announced drain keeps its time.
      if (this.flushBy && now() > Math.max(this.flushBy, this.heard + this.lost)) {
        await this.flush(this.drain, 'deadline');
        this.emit('flushed');
      }
      if (!this.id) continue;
      try {
        // What could not be said while the owner was away is said now.
        const there = new Set((await this.call('POST', '/heartbeat', { remaining: this.holds.size })).holds.map((h) => h.id));
        for (const hold of this.holds.values()) if (!there.has(hold.id)) await this.call('POST', '/hold', hold);
        for (const id of there) if (!this.holds.has(id)) await this.call('POST', '/release', { id });
      } catch {} // follow sees to it
    }
  }

  // hold holds the flush until the function that it returns is called. Nothing: the flush has begun, it is too late.
  async hold(name) {
    const hold = { id: `${name}-${randomUUID()}`, name };
    if (this.flushing.size > 0) return undefined;
    this.holds.set(hold.id, hold);
    try {
      await this.call('POST', '/hold', hold);
    } catch (e) {
      if (e.kind === 'flush-has-begun') {
        this.holds.delete(hold.id);
        return undefined;
      }
    }
    return async () => {
      this.holds.delete(hold.id);
      this.emit('released');
      await this.call('POST', '/release', hold).catch(() => {}); // else with the next heartbeat
    };
  }

  // end says goodbye, so that nothing is thought of the silence that follows.
  async end() {
    if (!this.over) await this.call('DELETE', '').catch(() => {}); // there may be nobody
    this.over = true;
  }
}

let draining = false;
const session = new Session((reason) => log('everything is written'));
session.on('draining', (yes) => (draining = yes));

async function job(seconds, res) {
  const release = await session.hold('job');
  if (!release) return res.writeHead(409).end('too late\n');
  res.writeHead(202).end('begun\n');
  await sleep(seconds * 1000);
  log('job done');
  await release();
}

const server = http.createServer((req, res) => {
  const url = new URL(req.url, 'http://x');
  // While it drains each answer is the last of its connection.
  if (draining) res.setHeader('Connection', 'close');
  if (url.pathname === '/ready') res.writeHead(draining ? 503 : 200).end(draining ? 'draining\n' : 'ready\n');
  else if (url.pathname === '/job') job(Number(url.searchParams.get('s') ?? 8), res);
  else res.end('hello from node\n');
});
const [port, host = '127.0.0.1'] = process.argv.slice(2).reverse();
server.listen(Number(port), host, () => log('listening'));

// The flush of the session or the stop signal, which without an agent is all there is: then its jobs are waited for here.
async function stopped() {
  await new Promise((resolve) => process.on('SIGTERM', resolve)); // a second one is harmless
  draining = true;
  while (session.holds.size > 0) await once(session, 'released');
}
await Promise.race([once(session, 'flushed'), stopped()]);
draining = true;
await session.flush(session.drain, 'signal');
await new Promise((resolve) => {
  server.close(resolve); // when the last answer is out
  server.closeIdleConnections();
});
await session.end();
log('end');
process.exit(0);
