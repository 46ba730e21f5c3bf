// Captures the activations of a small model and reads them back. A small wrapper
// around strap.h has classes that own captures and readers, and throws exceptions.
//
//   ./capture [FILE]        FILE: default capture.stream

#include <strap.h>

#include <cmath>
#include <cstdint>
#include <exception>
#include <iomanip>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// ---- the wrapper ------------------------------------------------------------

class StrapError : public std::runtime_error {
 public:
  explicit StrapError(const strap_error& error)
      : std::runtime_error(error.message), code(error.code), sys_errno(error.sys_errno) {}
  const strap_status code;
  const int sys_errno;
};

// Calls f(args..., &error), throws a StrapError if it fails, and returns its status.
template <typename F, typename... Args>
strap_status call(F f, Args... args) {
  strap_error error;
  const strap_status status = f(args..., &error);
  if (status < 0) throw StrapError(error);
  return status;
}

// A struct of strap.h with struct_size set and all other fields zero.
template <typename T>
T sized() {
  T value{};
  value.struct_size = sizeof value;
  return value;
}

// A capture. close() ends it and throws if a write failed. If an exception ends the
// scope first, the destructor closes without waiting: packets that are not written yet
// are lost, and the stream keeps the others.
class Capture {
 public:
  Capture(const std::string& path, const strap_open_options& options) {
    call(strap_open, path.c_str(), &options, &session_);
  }
  Capture(Capture&& other) noexcept : session_(std::exchange(other.session_, 0)) {}
  Capture& operator=(Capture&& other) noexcept {
    std::swap(session_, other.session_);
    return *this;
  }
  ~Capture() {
    if (session_ != 0) strap_discard(session_, nullptr, nullptr);
  }

  std::uint32_t layer(const std::string& model, const std::string& name) {
    std::uint32_t id;
    call(strap_layer, session_, model.c_str(), name.data(), name.size(), nullptr, &id);
    return id;
  }

  // Copies the tensor. The caller may change the values when the call returns.
  void enqueue(std::uint32_t layer, std::int64_t step, const std::vector<std::int64_t>& shape,
               const std::vector<float>& values) {
    strap_tensor tensor = sized<strap_tensor>();
    tensor.layer = layer;
    tensor.dtype = STRAP_FLOAT32;
    tensor.ndim = static_cast<std::int32_t>(shape.size());
    tensor.shape = shape.data();
    tensor.data = values.data();
    tensor.step = step;
    tensor.token = -1;
    call(strap_enqueue, session_, &tensor, -1);
  }

  strap_stats_t stats() const {
    strap_stats_t stats = sized<strap_stats_t>();
    call(strap_stats, session_, &stats);
    return stats;
  }

  void flush() { call(strap_flush, session_, -1); }
  void close() { call(strap_close, std::exchange(session_, 0), -1); }

 private:
  strap_session session_ = 0;
};

// An open stream.
class Reader {
 public:
  explicit Reader(const std::string& path) {
    call(strap_reader_open, path.c_str(), nullptr, &reader_, &info_);
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() { strap_reader_close(reader_, nullptr); }

  const strap_reader_info& info() const { return info_; }

  strap_packet packet(std::uint64_t row) const {
    strap_packet packet = sized<strap_packet>();
    call(strap_reader_at, reader_, row, &packet);
    return packet;
  }

  std::string name(const strap_packet& packet) const {
    std::string name(packet.name_bytes + 1, '\0');
    call(strap_reader_name, reader_, packet.row, name.data(), name.size());
    name.pop_back();
    return name;
  }

  // The elements of a packet with 2-byte elements, in row-major order.
  std::vector<std::uint16_t> halves(const strap_packet& packet) const {
    std::vector<std::uint16_t> values(packet.decoded_bytes / 2);
    call(strap_reader_read, reader_, packet.row, static_cast<void*>(values.data()),
         packet.decoded_bytes);
    return values;
  }

 private:
  strap_reader reader_ = 0;
  strap_reader_info info_ = sized<strap_reader_info>();
};

// ---- the example ------------------------------------------------------------

// One layer of the model: reads and overwrites the activations in place.
void forward(std::size_t layer, int step, std::vector<float>& activations) {
  for (std::size_t i = 0; i < activations.size(); i++) {
    const float input = layer == 0 ? static_cast<float>(step) : activations[i];
    activations[i] =
        std::sin(input * static_cast<float>(layer + 1) + static_cast<float>(i) * 0.01f);
  }
}

void capture(const std::string& path) {
  auto options = sized<strap_open_options>();
  options.codec = STRAP_CODEC_ZSTD;
  options.workers = 2;
  options.max_memory_bytes = 64 << 20;
  Capture capture(path, options);

  std::vector<std::uint32_t> layers;
  for (const char* name : {"embed", "mlp.up", "mlp.down"})
    layers.push_back(capture.layer("demo", name));

  const std::vector<std::int64_t> shape = {2, 256};
  std::vector<float> activations(2 * 256);
  for (int step = 0; step < 4; step++)
    for (std::size_t l = 0; l < layers.size(); l++) {
      forward(l, step, activations);
      capture.enqueue(layers[l], step, shape, activations);
    }
  capture.flush();
  const strap_stats_t stats = capture.stats();
  capture.close();
  std::cout << "captured " << stats.tensors << " tensors, " << stats.raw_bytes << " bytes, in "
            << stats.file_bytes << " bytes\n\n";
}

// The value of an IEEE 754 binary16. The stream stores float32 in this format.
double half_value(std::uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const double sign = h >> 15 ? -1 : 1;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(fraction + 1024, exponent - 25);
}

void print_table(const std::string& path) {
  const Reader reader(path);
  if (reader.info().problem[0] != '\0') std::cout << "note: " << reader.info().problem << '\n';

  std::cout << "step  layer      shape          bytes      mean      norm\n" << std::fixed;
  for (std::uint64_t row = 0; row < reader.info().rows; row++) {
    const strap_packet packet = reader.packet(row);
    if (!packet.present) continue;
    double sum = 0, squares = 0;
    const auto values = reader.halves(packet);
    for (const std::uint16_t h : values) {
      sum += half_value(h);
      squares += half_value(h) * half_value(h);
    }
    std::cout << std::setw(4) << packet.step << "  " << std::left << std::setw(10)
              << reader.name(packet) << std::right << ' ' << std::setw(3) << packet.shape[0]
              << " x " << std::left << std::setw(4) << packet.shape[1] << std::right << ' '
              << std::setw(8) << packet.payload_bytes << ' ' << std::setprecision(4)
              << std::setw(9) << sum / static_cast<double>(values.size()) << ' ' << std::setw(9)
              << std::sqrt(squares) << '\n';
  }
}

int main(int argc, char** argv) try {
  const std::string path = argc > 1 ? argv[1] : "capture.stream";
  if (strap_abi_version() != STRAP_ABI_VERSION)
    throw std::runtime_error("libstrap " + std::string(strap_version()) +
                             " has another interface than this program");
  capture(path);
  print_table(path);
  return 0;
} catch (const StrapError& e) {
  std::cerr << e.what() << " (status " << e.code << ", errno " << e.sys_errno << ")\n";
  return 1;
} catch (const std::exception& e) {
  std::cerr << e.what() << '\n';
  return 1;
}
