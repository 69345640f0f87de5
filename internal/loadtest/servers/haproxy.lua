-- SPDX-License-Identifier: Apache-2.0

core.register_service("sleep", "http", function(applet)
	core.msleep(tonumber(string.match(applet.qs or "", "ms=(%d+)")) or 0)
	applet:set_status(200)
	applet:add_header("content-length", "6")
	applet:start_response()
	applet:send("hello\n")
end)

core.register_service("big", "http", function(applet)
	local chunk = string.rep("0123456789abcde\n", 512)
	applet:set_status(200)
	applet:add_header("content-length", tostring(10 * 1024 * 1024))
	applet:start_response()
	for _ = 1, 10 * 1024 * 1024 / #chunk do
		applet:send(chunk)
	end
end)
