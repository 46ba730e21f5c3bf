// Runs a GGUF model in llama.cpp and captures tensors of its graph: llama.cpp calls a function for
// each tensor that it computes, and the function hands the tensor to libstrap. With
// --flight-recorder the last steps stay in memory until something goes wrong.
//
//   ./capture MODEL.gguf FILE.stream PROMPT [options]
//   ./capture MODEL.gguf PROMPT --flight-recorder FOLDER [options]
//
// README.md lists the options.

#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>
#include <signal.h>
#include <strap.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// The element type in strap.h. Quantised types have none: 0.
strap_dtype dtype_of(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32: return STRAP_FLOAT32;
    case GGML_TYPE_F16: return STRAP_FLOAT16;
    case GGML_TYPE_BF16: return STRAP_BFLOAT16;
    case GGML_TYPE_F64: return STRAP_FLOAT64;
    case GGML_TYPE_I8: return STRAP_INT8;
    case GGML_TYPE_I16: return STRAP_INT16;
    case GGML_TYPE_I32: return STRAP_INT32;
    case GGML_TYPE_I64: return STRAP_INT64;
    default: return 0;
  }
}

// The name without the number of the layer: "l_out-12" is an "l_out".
std::string kind_of(const std::string& name) {
  const auto dash = name.rfind('-');
  const bool numbered = dash != std::string::npos && dash + 1 < name.size() &&
                        std::all_of(name.begin() + dash + 1, name.end(),
                                    [](unsigned char c) { return std::isdigit(c); });
  return numbered ? name.substr(0, dash) : name;
}

// The options of strap_open for a capture to a file. A flight recorder adds some.
strap_open_options open_options(std::uint64_t memory_bytes) {
  strap_open_options options{};
  options.struct_size = sizeof options;
  options.codec = STRAP_CODEC_LZ4;
  options.workers = 2;
  options.max_memory_bytes = memory_bytes;
  options.keep_float32 = 1;  // 0 stores float32 as float16, which takes half of the space
  return options;
}

// A capture of the tensors with the wanted names. A name stands for all layers ("l_out") or is whole
// ("l_out-12").
class Capture {
 public:
  Capture(const std::string& path, const strap_open_options& options, std::string model,
          std::set<std::string> wanted)
      : model_(std::move(model)), wanted_(std::move(wanted)) {
    check(strap_open(path.c_str(), &options, &session_, &error_));
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() {
    if (session_ != 0) strap_discard(session_, nullptr, nullptr);
  }

  // For llama_context_params.cb_eval, with the capture as cb_eval_user_data. llama.cpp first asks
  // whether a tensor is wanted. It computes up to a wanted tensor, and calls again with its values.
  // The answer false then ends the computation.
  static bool evaluated(ggml_tensor* tensor, bool ask, void* self) {
    auto& capture = *static_cast<Capture*>(self);
    if (ask)
      return capture.wanted_.count(tensor->name) || capture.wanted_.count(kind_of(tensor->name));
    return capture.take(tensor);
  }

  // Call it before each llama_decode. Step 0 is the prompt and leads to token 0.
  void begin_step() {
    step_++;
    for (auto& layer : layers_) layer.second.calls = 0;
  }

  // Writes what is queued. Throws if a tensor could not be captured or written.
  strap_stats_t close() {
    check_tensors();
    check(strap_flush(session_, -1, &error_));
    const strap_stats_t stats = this->stats();
    check(strap_close(session_, -1, &error_));
    session_ = 0;
    return stats;
  }

  strap_stats_t stats() {
    strap_stats_t stats{};
    stats.struct_size = sizeof stats;
    check(strap_stats(session_, &stats, &error_));
    return stats;
  }

  // Throws if a tensor of the last step could not be captured. llama_decode then failed for this.
  void check_tensors() const { check(error_.code); }

  // ---- with a ring: see FlightRecorder ----

  std::int64_t step() const { return step_; }

  // All tensors of the step are here: in a ring file it counts as whole.
  void end_step() { check(strap_step_end(session_, step_, -1, &error_)); }

  // The first tensor since the last call that has a value that is not finite.
  std::optional<strap_alarm_t> alarm() {
    strap_alarm_t alarm{};
    alarm.struct_size = sizeof alarm;
    const strap_status status = strap_alarm(session_, &alarm, -1, &error_);
    check(status);
    return status == STRAP_END ? std::nullopt : std::optional(alarm);
  }

  // Writes the steps of the ring to a new stream, and waits for the disk.
  void dump(const std::string& path) {
    check(strap_dump(session_, path.c_str(), 0, -1, &error_));
    check(strap_dump_end(session_, -1, &error_));
    check(strap_checkpoint(session_, -1, nullptr, &error_));
  }

  std::string name_of(std::uint32_t layer) const {
    for (const auto& [name, known] : layers_)
      if (known.id == layer) return name;
    return "?";
  }

 private:
  void check(strap_status status) const {
    if (status < 0) throw std::runtime_error(error_.message);
  }

  struct Layer {
    std::uint32_t id;
    std::uint32_t calls;  // in this step: a name comes again if llama.cpp uses it twice
  };

  // Returns whether the computation shall go on. Exceptions must not pass through llama.cpp.
  bool take(ggml_tensor* t) {
    const std::string name = t->name;
    auto found = layers_.find(name);
    if (found == layers_.end()) {
      std::uint32_t id;
      if (strap_layer(session_, model_.c_str(), name.data(), name.size(), nullptr, &id, &error_) < 0)
        return false;
      found = layers_.emplace(name, Layer{id, 0}).first;
    }
    Layer& layer = found->second;
    const std::uint32_t call = layer.calls++;

    const strap_dtype dtype = dtype_of(t->type);
    if (dtype == 0) {  // the index has a note, and stats.failed counts it
      const std::string reason = std::string("quantised: ") + ggml_type_name(t->type);
      return strap_note(session_, layer.id, step_, step_, call, reason.c_str(), &error_) >= 0;
    }

    // ggml gives the fastest dimension first and strides in bytes. Trailing dimensions of 1 go, but
    // a single token keeps its row: [1, width].
    std::int64_t shape[GGML_MAX_DIMS], strides[GGML_MAX_DIMS];
    const int ndim = std::max(ggml_n_dims(t), 2);
    for (int i = 0; i < ndim; i++) {
      shape[i] = t->ne[ndim - 1 - i];
      strides[i] = static_cast<std::int64_t>(t->nb[ndim - 1 - i] / ggml_element_size(t));
    }

    // Memory of a device is copied here first, with its gaps, so the strides hold for the copy too.
    const void* data = t->data;
    if (!ggml_backend_buffer_is_host((t->view_src ? t->view_src : t)->buffer)) {
      copy_.resize(ggml_nbytes(t));
      ggml_backend_tensor_get(t, copy_.data(), 0, copy_.size());
      data = copy_.data();
    }

    strap_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    tensor.layer = layer.id;
    tensor.dtype = dtype;
    tensor.ndim = ndim;
    tensor.shape = shape;
    tensor.strides = strides;
    tensor.data = data;
    tensor.step = step_;
    tensor.token = step_;
    tensor.call = call;
    return strap_enqueue(session_, &tensor, -1, &error_) >= 0;  // has copied when it returns
  }

  std::string model_;
  std::set<std::string> wanted_;
  strap_session session_ = 0;
  strap_error error_{};
  std::map<std::string, Layer> layers_;
  std::vector<char> copy_;
  std::int64_t step_ = -1;
};

// ---- the flight recorder ----------------------------------------------------

std::atomic<bool> asked{false};  // SIGUSR1 came
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler stores it");

// Writes what the ring of a capture keeps, to FOLDER/dump-000001.stream and so on.
class FlightRecorder {
 public:
  FlightRecorder(Capture& capture, std::filesystem::path folder)
      : capture_(capture), folder_(std::move(folder)) {
    struct sigaction action {};
    action.sa_handler = [](int) { asked = true; };
    // SA_ONSTACK, because a thread of Go may get the signal, and its stack is small.
    action.sa_flags = SA_ONSTACK | SA_RESTART;
    sigaction(SIGUSR1, &action, nullptr);
    std::cerr << "the last steps are in memory: kill -USR1 " << getpid() << " writes them\n";
  }

  // Call it after each llama_decode.
  void end_step() {
    capture_.end_step();
    if (const auto alarm = capture_.alarm()) {
      std::ostringstream why;
      why << capture_.name_of(alarm->layer) << " has ";
      std::isnan(alarm->value) ? why << "nan" : why << alarm->value;  // no "-nan"
      why << " at element " << alarm->element << " in step " << alarm->step;
      // Later steps read it in the cache, and alarm too.
      const auto now = std::chrono::steady_clock::now();
      if (!alarmed_ || now - *alarmed_ >= std::chrono::minutes(1)) {
        alarmed_ = now;
        dump(why.str());
      } else {
        held_back_++;
      }
    }
    if (asked.exchange(false)) dump("SIGUSR1");
  }

  // A dump that cannot be written ends neither the host nor the recorder.
  void dump(const std::string& why) noexcept try {
    const strap_stats_t stats = capture_.stats();
    if (stats.ring_steps == 0) throw std::runtime_error("no step is in memory");
    std::filesystem::create_directories(folder_);
    std::filesystem::path path;
    for (int number = 1; path.empty() || std::filesystem::exists(path); number++) {
      const std::string digits = std::to_string(number);
      const std::string zeros(6 - std::min<std::size_t>(digits.size(), 6), '0');
      path = folder_ / ("dump-" + zeros + digits + ".stream");
    }
    capture_.dump(path.string());
    dumps_++;
    std::cerr << path.string() << " has " << stats.ring_steps << " steps, from step "
              << stats.ring_oldest_step << " on: " << why << '\n';
  } catch (const std::exception& e) {
    std::cerr << "no dump could be written (" << why << "): " << e.what() << '\n';
  }

  // What was kept, in a line.
  std::string kept() {
    const strap_stats_t stats = capture_.stats();
    std::ostringstream text;
    text << "kept " << stats.ring_steps << " steps";
    if (stats.ring_steps > 0)
      text << " from step " << stats.ring_oldest_step << " on, " << stats.ring_bytes << " bytes";
    text << "; " << stats.ring_gone_steps << " older ones gave way; " << dumps_ << " dumps, "
         << held_back_ << " held back; " << stats.dropped << " tensors found no room";
    return text.str();
  }

 private:
  Capture& capture_;
  std::filesystem::path folder_;
  std::optional<std::chrono::steady_clock::time_point> alarmed_;
  int dumps_ = 0, held_back_ = 0;
};

// ---- the host ---------------------------------------------------------------

struct Options {
  std::string model, stream, prompt;
  int new_tokens = 8;
  int context = 0;  // positions; 0: as many as prompt and new tokens take
  int threads = 0;  // 0: as many as llama.cpp chooses
  std::uint64_t memory_bytes = 256 << 20;
  std::string flight_recorder, ring_file;  // "": none
  int steps = 0;                           // 0: as many as the memory holds
  std::set<std::string> tensors = {"l_out"};
  ggml_type cache_type = GGML_TYPE_F16;
  llama_flash_attn_type flash_attn = LLAMA_FLASH_ATTN_TYPE_AUTO;
};

// A whole number of at least 0.
int number(const std::string& option, const std::string& value) {
  std::size_t end = 0;
  int n = -1;
  try {
    n = std::stoi(value, &end);
  } catch (const std::logic_error&) {
  }
  if (n < 0 || end != value.size())
    throw std::runtime_error(option + " " + value + ": give a whole number");
  return n;
}

Options parse(int argc, char** argv) {
  Options given;
  std::vector<std::string> plain;
  for (int i = 1; i < argc; i++) {
    const std::string option = argv[i];
    if (option.rfind("--", 0) != 0) {
      plain.push_back(option);
      continue;
    }
    if (++i == argc) throw std::runtime_error(option + " has no value");
    const std::string value = argv[i];
    if (option == "--new") {
      given.new_tokens = number(option, value);
    } else if (option == "--context") {
      given.context = number(option, value);
    } else if (option == "--threads") {
      given.threads = number(option, value);
    } else if (option == "--memory-mb") {
      given.memory_bytes = static_cast<std::uint64_t>(number(option, value)) * 1000 * 1000;
    } else if (option == "--flight-recorder") {
      given.flight_recorder = value;
    } else if (option == "--steps") {
      given.steps = number(option, value);
    } else if (option == "--ring-file") {
      given.ring_file = value;
    } else if (option == "--tensors") {
      given.tensors.clear();
      std::istringstream names(value);
      for (std::string name; std::getline(names, name, ',');) given.tensors.insert(name);
    } else if (option == "--cache-type") {
      int type = 0;
      while (type < GGML_TYPE_COUNT && value != ggml_type_name(static_cast<ggml_type>(type))) type++;
      if (type == GGML_TYPE_COUNT) throw std::runtime_error("no type is called " + value);
      given.cache_type = static_cast<ggml_type>(type);
    } else if (option == "--flash-attn") {
      given.flash_attn = value == "on"    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                         : value == "off" ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                          : LLAMA_FLASH_ATTN_TYPE_AUTO;
    } else {
      throw std::runtime_error("no option is called " + option);
    }
  }
  const bool recorder = !given.flight_recorder.empty();
  if (plain.size() != (recorder ? 2 : 3))
    throw std::runtime_error("usage: capture MODEL.gguf FILE.stream PROMPT [options]\n"
                             "       capture MODEL.gguf PROMPT --flight-recorder FOLDER [options]");
  if (!recorder && (given.steps > 0 || !given.ring_file.empty()))
    throw std::runtime_error("--steps and --ring-file need --flight-recorder");
  given.model = plain.front(), given.prompt = plain.back();
  given.stream = recorder ? given.flight_recorder : plain[1];
  return given;
}

// Runs one step. Every position gets logits: else the last layer computes the last position alone.
void decode(llama_context* context, Capture& capture, const std::vector<llama_token>& tokens,
            llama_pos first) {
  const auto count = static_cast<std::int32_t>(tokens.size());
  llama_batch batch = llama_batch_init(count, 0, 1);
  batch.n_tokens = count;
  for (std::int32_t i = 0; i < count; i++) {
    batch.token[i] = tokens[i];
    batch.pos[i] = first + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  capture.begin_step();
  const int failed = llama_decode(context, batch);
  llama_batch_free(batch);
  capture.check_tensors();
  if (failed)
    throw std::runtime_error("llama_decode returned " + std::to_string(failed) + " in step " +
                             std::to_string(capture.step()));
}

// Writes tokens greedily behind the prompt.
void generate(llama_context* context, Capture& capture, FlightRecorder* recorder,
              std::vector<llama_token>& tokens, int new_tokens) {
  const llama_vocab* vocab = llama_model_get_vocab(llama_get_model(context));
  std::vector<llama_token> step = tokens;
  for (int i = 0; i < new_tokens; i++) {
    decode(context, capture, step, static_cast<llama_pos>(tokens.size() - step.size()));
    if (recorder) recorder->end_step();
    const float* logits = llama_get_logits_ith(context, -1);
    const auto best = std::max_element(logits, logits + llama_vocab_n_tokens(vocab)) - logits;
    step = {static_cast<llama_token>(best)};
    tokens.push_back(step[0]);
  }
}

void run(const Options& given) {
  strap_open_options options = open_options(given.memory_bytes);
  if (!given.flight_recorder.empty()) {
    options.ring = 1;
    options.ring_steps = given.steps;
    options.ring_file = given.ring_file.empty() ? nullptr : given.ring_file.c_str();
  }
  Capture capture(given.stream, options, given.model, given.tensors);
  llama_model* model = llama_model_load_from_file(given.model.c_str(), llama_model_default_params());
  if (!model) throw std::runtime_error(given.model + " is no model that llama.cpp can load");
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const auto length = static_cast<std::int32_t>(given.prompt.size());
  const auto room = -llama_tokenize(vocab, given.prompt.data(), length, nullptr, 0, true, false);
  std::vector<llama_token> tokens(room);
  llama_tokenize(vocab, given.prompt.data(), length, tokens.data(), room, true, false);

  llama_context_params parameters = llama_context_default_params();
  parameters.n_batch = static_cast<std::uint32_t>(tokens.size()) + given.new_tokens;
  parameters.n_ctx = given.context ? given.context : parameters.n_batch;
  parameters.type_k = parameters.type_v = given.cache_type;
  parameters.flash_attn_type = given.flash_attn;
  if (given.threads) parameters.n_threads = parameters.n_threads_batch = given.threads;
  parameters.cb_eval = Capture::evaluated;
  parameters.cb_eval_user_data = &capture;
  llama_context* context = llama_init_from_model(model, parameters);
  if (!context) throw std::runtime_error("llama.cpp made no context for " + given.model);
  if (tokens.size() > llama_n_batch(context))
    throw std::runtime_error("the prompt has " + std::to_string(tokens.size()) +
                             " tokens: give a larger --context");

  std::optional<FlightRecorder> recorder;
  if (!given.flight_recorder.empty()) recorder.emplace(capture, given.flight_recorder);
  try {
    generate(context, capture, recorder ? &*recorder : nullptr, tokens, given.new_tokens);
  } catch (const std::exception& e) {
    if (recorder) recorder->dump(e.what());
    throw;
  }
  if (recorder) std::cout << recorder->kept() << '\n';
  const strap_stats_t stats = capture.close();
  std::cout << "captured " << stats.tensors << " tensors, " << stats.raw_bytes << " bytes; "
            << stats.failed << " quantised ones left out\ntokens";
  for (const llama_token token : tokens) std::cout << ' ' << token;
  std::cout << '\n';
  llama_free(context);
  llama_model_free(model);
}

int main(int argc, char** argv) try {
  llama_log_set([](ggml_log_level level, const char* text, void*) {
    if (level == GGML_LOG_LEVEL_ERROR) std::cerr << text;
  }, nullptr);
  run(parse(argc, argv));
  return 0;
} catch (const std::exception& e) {
  std::cerr << e.what() << '\n';
  return 1;
}
