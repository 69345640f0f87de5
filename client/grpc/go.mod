module github.com/ebbproxy/ebb/client/grpc

go 1.26.0

require (
	github.com/ebbproxy/ebb v0.0.0
	google.golang.org/grpc v1.83.2
)

require (
	golang.org/x/net v0.61.0 // indirect
	golang.org/x/sys v0.50.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260526163538-3dc84a4a5aaa // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace github.com/ebbproxy/ebb => ../..
