// SPDX-License-Identifier: Apache-2.0
// A server of the standard library. It handles no signal at all.
//
// usage: node server.mjs HOST PORT NAME [CERTIFICATE]

import { readFileSync } from 'node:fs'
import http from 'node:http'
import https from 'node:https'

const [host, port, name, certificate] = process.argv.slice(2)
const big = Buffer.from('0123456789abcde\n'.repeat((10 * 1024 * 1024) / 16))

function answer (request, response) {
  const url = new URL(request.url, 'http://server')
  const body = url.pathname === '/big' ? big : 'hello\n'
  const send = () => {
    response.writeHead(200, { 'Content-Length': body.length, 'X-Served-By': name })
    response.end(body)
  }
  const ms = Number(url.searchParams.get('ms') ?? 0)
  if (ms > 0) setTimeout(send, ms)
  else send()
}

const server = certificate === undefined
  ? http.createServer(answer)
  : https.createServer({ cert: readFileSync(certificate), key: readFileSync(certificate) }, answer)
// A client that is silent, or reads slowly, is a case to test and not to time out.
server.headersTimeout = 0
server.requestTimeout = 0
server.keepAliveTimeout = 75_000
server.listen({ host, port: Number(port), backlog: 4096 })
