//go:build linux

// Command encodetest encodes files as zstd payloads, for benchmarks/zstd_peers.py.
//
//	encodetest               prints the sets of loops that this processor can run
//	encodetest LOOPS LEVEL   encodes with one of them, at a level of zstd
//
// Each line of standard input names a folder. encodetest encodes each file of the folder once, and
// prints the CPU seconds and the bytes of the payloads.
package main

import (
	"bufio"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/codec"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("encodetest: ")
	switch len(os.Args) {
	case 1:
		for _, loops := range codec.Levels() {
			fmt.Println(loops)
		}
	case 3:
		if err := serve(os.Args[1], os.Args[2]); err != nil {
			log.Fatal(err)
		}
	default:
		log.Fatal("usage: encodetest [LOOPS LEVEL]")
	}
}

func serve(loops, level string) error {
	number, err := strconv.Atoi(level)
	if err != nil {
		return err
	}
	codec.UseLevel(loops)
	encoder, err := codec.NewEncoder(codec.Zstd, number)
	if err != nil {
		return err
	}
	runtime.LockOSThread() // cpu reads the time of the thread
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		seconds, stored, err := encodeFolder(encoder, lines.Text())
		if err != nil {
			return err
		}
		fmt.Println(seconds, stored)
	}
	return nil
}

// encodeFolder encodes the files of a folder. The time to copy each file into the encoder's buffer
// is not counted.
func encodeFolder(encoder *codec.Encoder, folder string) (seconds float64, stored int, err error) {
	files, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil {
		return 0, 0, err
	}
	var buf []byte
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			return 0, 0, err
		}
		if need := len(source) + codec.Headroom(codec.Zstd, len(source)); len(buf) < need {
			buf = make([]byte, need)
		}
		front := codec.Front(codec.Zstd, len(source))
		copy(buf[front:], source)
		before := cpu()
		n, err := encoder.EncodeInPlace(buf, front, len(source))
		if err != nil {
			return 0, 0, err
		}
		seconds += (cpu() - before).Seconds()
		stored += n
	}
	return seconds, stored, nil
}

// cpu returns the time that this thread has run.
func cpu() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		log.Fatal(err)
	}
	return time.Duration(now.Nano())
}
