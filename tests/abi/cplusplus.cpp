// strap.h compiles as C++17. An object owns a session: close() closes it, and its destructor
// discards it if an exception skipped close().
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace {

// Owns a session, and discards it in the destructor if close() was not called.
class Session {
 public:
  // Waits while the path is busy: a discarded session holds its file until its last write ends.
  explicit Session(const std::string& path) {
    strap_open_options options = open_options();
    options.codec = STRAP_CODEC_ZSTD;
    strap_status status;
    const double deadline = seconds() + 10;
    while ((status = strap_open(path.c_str(), &options, &id_, &error)) == STRAP_ERR_BUSY)
      CHECK(seconds() < deadline, "%s", error.message);
    CHECK(status == STRAP_OK, "%s", error.message);
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    if (id_ != 0) strap_discard(id_, nullptr, nullptr);
  }
  strap_session id() const { return id_; }
  void close() { close_stream(std::exchange(id_, 0)); }

 private:
  strap_session id_ = 0;
};

void capture(const std::string& path, int tensors, bool fail) {
  Session session(path);
  const uint32_t layer = add_layer(session.id(), "layer");
  const std::vector<double> values = {1.5, -2.5, 1e300};
  const std::vector<int64_t> shape = {static_cast<int64_t>(values.size())};
  for (int i = 0; i < tensors; i++) {
    strap_tensor t = tensor_of(layer, STRAP_FLOAT64, 1, shape.data(), values.data());
    t.step = i;
    enqueue(session.id(), &t);
  }
  EXPECT(STRAP_OK, strap_flush(session.id(), -1, &error));
  if (fail) throw std::runtime_error("the model failed");
  session.close();
}

uint64_t packets(const std::string& path) {
  strap_reader_info info;
  const strap_reader reader = open_reader(path.c_str(), &info);
  const std::unique_ptr<void, decltype(&std::free)> row(read_row(reader, 0), &std::free);
  CHECK(static_cast<const double*>(row.get())[2] == 1e300, "float64 is kept");
  close_reader(reader);
  return info.packets;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string path = stream_path(argc, argv);
  capture(path, 5, false);
  CHECK(packets(path) == 5, "%llu packets", static_cast<unsigned long long>(packets(path)));
  try {
    capture(path, 3, true);
    CHECK(false, "no exception");
  } catch (const std::runtime_error&) {
  }
  CHECK(packets(path) == 3, "what was flushed stays after an exception");
  capture(path, 4, false);  // the path becomes free again
  CHECK(packets(path) == 4, "%llu packets", static_cast<unsigned long long>(packets(path)));
  std::puts("C++ captures and reads");
}
