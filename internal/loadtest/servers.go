// SPDX-License-Identifier: Apache-2.0

package loadtest

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"
)

//go:embed servers
var serverFiles embed.FS

// ServerOptions says how one of the real servers listens. Each answers / at once or after ?ms=
// milliseconds, /big with 10 MB, and says in X-Served-By who it is.
type ServerOptions struct {
	Host      string // a literal address, default 127.0.0.1; :: is both families
	Name      string // of the X-Served-By header, default that of the program
	Workers   int    // nginx: worker processes, haproxy: threads; default 2
	ReusePort bool   // nginx: one listener per worker
	TLS       bool   // with a certificate made for the purpose
	HTTP2     bool   // nginx, haproxy: under TLS by ALPN; nginx without TLS: prior knowledge only
}

// serverConfig is what the templates see.
type serverConfig struct {
	ServerOptions
	Dir         string
	Address     string
	Dual        bool
	Certificate string
	EchoModule  string
	Lua         string
}

// Nginx writes a configuration into dir and returns the command line that serves on port in the
// foreground: a master and its workers. SIGQUIT stops it gracefully, SIGTERM at once. It needs the packages
// nginx and libnginx-mod-http-echo.
func Nginx(dir string, port int, o ServerOptions) ([]string, error) {
	exe, err := find("nginx", "nginx")
	if err != nil {
		return nil, err
	}
	c, err := prepare(dir, port, o, "nginx")
	if err != nil {
		return nil, err
	}
	if c.EchoModule, err = echoModule(); err != nil {
		return nil, err
	}
	if err := writeBig(filepath.Join(dir, "big")); err != nil {
		return nil, err
	}
	conf, err := render(dir, "nginx.conf", c)
	if err != nil {
		return nil, err
	}
	// The error log named on the command line is for what comes before the configuration is read.
	return []string{exe, "-p", c.Dir, "-e", "stderr", "-c", conf}, nil
}

func echoModule() (string, error) {
	const module = "ngx_http_echo_module.so"
	for _, dir := range []string{"/usr/lib/nginx/modules", "/usr/lib64/nginx/modules", "/usr/share/nginx/modules"} {
		path := filepath.Join(dir, module)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s: %w; install the package libnginx-mod-http-echo", module, fs.ErrNotExist)
}

// HAProxy writes a configuration into dir and returns the command line that serves on port in the
// foreground: a master and its worker. SIGUSR1 stops it gracefully, SIGTERM at once.
func HAProxy(dir string, port int, o ServerOptions) ([]string, error) {
	exe, err := find("haproxy", "haproxy")
	if err != nil {
		return nil, err
	}
	c, err := prepare(dir, port, o, "haproxy")
	if err != nil {
		return nil, err
	}
	if c.Lua, err = copyOut(dir, "haproxy.lua"); err != nil {
		return nil, err
	}
	conf, err := render(dir, "haproxy.cfg", c)
	if err != nil {
		return nil, err
	}
	return []string{exe, "-W", "-db", "-f", conf}, nil
}

// Python returns the command line of Python's own threading HTTP server, which dies at any stop signal.
func Python(dir string, port int, o ServerOptions) ([]string, error) {
	return script(dir, port, o, "server.py", "python3", "python3")
}

// Node returns the command line of Node's own HTTP server, which dies at any stop signal.
func Node(dir string, port int, o ServerOptions) ([]string, error) {
	return script(dir, port, o, "server.mjs", "node", "nodejs")
}

func script(dir string, port int, o ServerOptions, file, program, pkg string) ([]string, error) {
	exe, err := find(program, pkg)
	if err != nil {
		return nil, err
	}
	c, err := prepare(dir, port, o, program)
	if err != nil {
		return nil, err
	}
	path, err := copyOut(dir, file)
	if err != nil {
		return nil, err
	}
	argv := []string{exe, path, c.Host, strconv.Itoa(port), c.Name}
	if c.TLS {
		argv = append(argv, c.Certificate)
	}
	return argv, nil
}

// find looks for a program. The error wraps [exec.ErrNotFound] and names the package to install.
func find(program, pkg string) (string, error) {
	exe, err := exec.LookPath(program)
	if errors.Is(err, exec.ErrNotFound) {
		// Debian keeps daemons where only root's PATH looks.
		exe, err = exec.LookPath(filepath.Join("/usr/sbin", program))
		if err != nil {
			return "", fmt.Errorf("find %s: %w; install the package %s", program, exec.ErrNotFound, pkg)
		}
	}
	if err != nil {
		return "", fmt.Errorf("find %s: %w", program, err)
	}
	return exe, nil
}

func prepare(dir string, port int, o ServerOptions, name string) (serverConfig, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return serverConfig{}, fmt.Errorf("find %s: %w", dir, err)
	}
	o.Host, o.Name, o.Workers = or(o.Host, "127.0.0.1"), or(o.Name, name), or(o.Workers, 2)
	c := serverConfig{
		ServerOptions: o, Dir: abs, Dual: o.Host == "::",
		Address:     net.JoinHostPort(o.Host, strconv.Itoa(port)),
		Certificate: filepath.Join(abs, "certificate.pem"),
	}
	// They go into configuration files of three languages.
	if strings.ContainsAny(o.Name+abs, "\"\\\n\r$%") {
		return c, fmt.Errorf("prepare server: the name %q or directory %q has a character that needs quoting", o.Name, abs)
	}
	if net.ParseIP(o.Host) == nil {
		return c, fmt.Errorf("prepare server: %q is no literal address", o.Host)
	}
	if o.TLS {
		return c, writeCertificate(c.Certificate)
	}
	return c, nil
}

func render(dir, name string, c serverConfig) (string, error) {
	t, err := template.ParseFS(serverFiles, "servers/"+name+".tmpl")
	if err != nil {
		return "", fmt.Errorf("parse template: %w", err)
	}
	path := filepath.Join(dir, name)
	f, err := os.Create(path)
	if err != nil {
		return "", fmt.Errorf("write configuration: %w", err)
	}
	if err := errors.Join(t.Execute(f, c), f.Close()); err != nil {
		return "", fmt.Errorf("write configuration %s: %w", path, err)
	}
	return filepath.Abs(path)
}

func copyOut(dir, name string) (string, error) {
	text, err := serverFiles.ReadFile("servers/" + name)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return "", fmt.Errorf("write %s: %w", name, err)
	}
	return filepath.Abs(path)
}

func writeBig(path string) error {
	chunk := strings.Repeat("0123456789abcde\n", 10<<20/16)
	if err := os.WriteFile(path, []byte(chunk), 0o644); err != nil {
		return fmt.Errorf("write body: %w", err)
	}
	return nil
}
