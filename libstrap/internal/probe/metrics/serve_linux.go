// Answers scrapes of /metrics.

package metrics

import (
	"cmp"
	"errors"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Listen opens an address for scrapes. address is a port, which means one of 127.0.0.1, or
// HOST:PORT.
//
// Errors: InvalidArgument for a bad address; Busy if the port is in use; IO for everything else.
func Listen(address string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil && !strings.ContainsAny(address, ":[]") {
		host, port, err = "", address, nil
	}
	if _, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil || host == "*" {
		return nil, status.New(status.InvalidArgument, "--listen %q: give a port, for 127.0.0.1, or HOST:PORT, as 9435 or 0.0.0.0:9435", address)
	}
	host = cmp.Or(host, "127.0.0.1")
	network := "tcp"
	if net.ParseIP(host).To4() != nil {
		network = "tcp4" // with "tcp", 0.0.0.0 would listen on IPv6 too
	}
	l, err := net.Listen(network, net.JoinHostPort(host, port))
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return nil, status.New(status.Busy, "--listen %s: the port is in use; give another one, or see by whom: ss -ltnp sport = :%s", address, port)
	case errors.Is(err, unix.EACCES):
		return nil, status.New(status.IO, "--listen %s: this user may not open the port; give one above 1023", address)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return nil, status.New(status.InvalidArgument, "--listen %s: this machine has no such address; ip addr shows those that it has", address)
	case err != nil:
		return nil, status.Wrap(status.IO, err, "--listen %s", address)
	}
	return l, nil
}

// Serve answers scrapes of /metrics until the listener is closed.
func (e *Exporter) Serve(l net.Listener) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(e)
	pages := http.NewServeMux()
	pages.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	server := &http.Server{
		Handler:           pages,
		ReadHeaderTimeout: 10 * time.Second,
		WriteTimeout:      time.Minute,
		IdleTimeout:       5 * time.Minute,
	}
	_ = server.Serve(l) // its only error is that the listener was closed
}
