// Runs a GGUF model in llama.cpp and captures tensors of its graph: llama.cpp calls a function for
// each tensor that it computes, and the function hands the tensor to libstrap.
//
//   ./capture MODEL.gguf FILE.stream PROMPT [--new 8] [--tensors l_out,...] [--cache-type f16]
//             [--flash-attn auto]

#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>
#include <strap.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <exception>
#include <iostream>
#include <map>
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

// A capture of the tensors with the wanted names. A name stands for all layers ("l_out") or is whole
// ("l_out-12").
class Capture {
 public:
  Capture(const std::string& path, std::string model, std::set<std::string> wanted)
      : model_(std::move(model)), wanted_(std::move(wanted)) {
    strap_open_options options{};
    options.struct_size = sizeof options;
    options.codec = STRAP_CODEC_LZ4;
    options.workers = 2;
    options.max_memory_bytes = 256 << 20;
    options.keep_float32 = 1;  // 0 stores float32 as float16, which takes half of the space
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
    check(error_.code);
    check(strap_flush(session_, -1, &error_));
    strap_stats_t stats{};
    stats.struct_size = sizeof stats;
    check(strap_stats(session_, &stats, &error_));
    check(strap_close(session_, -1, &error_));
    session_ = 0;
    return stats;
  }

  void check(strap_status status) const {
    if (status < 0) throw std::runtime_error(error_.message);
  }

 private:
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

// ---- the host ---------------------------------------------------------------

struct Options {
  std::string model, stream, prompt;
  int new_tokens = 8;
  std::set<std::string> tensors = {"l_out"};
  ggml_type cache_type = GGML_TYPE_F16;
  llama_flash_attn_type flash_attn = LLAMA_FLASH_ATTN_TYPE_AUTO;
};

Options parse(int argc, char** argv) {
  if (argc < 4 || argc % 2 != 0)
    throw std::runtime_error("usage: capture MODEL.gguf FILE.stream PROMPT [--new 8] "
                             "[--tensors l_out,...] [--cache-type f16] [--flash-attn auto]");
  Options given;
  given.model = argv[1], given.stream = argv[2], given.prompt = argv[3];
  for (int i = 4; i < argc; i += 2) {
    const std::string option = argv[i], value = argv[i + 1];
    if (option == "--new") {
      given.new_tokens = std::stoi(value);
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
  if (failed) throw std::runtime_error("llama_decode returned " + std::to_string(failed));
}

void run(const Options& given) {
  Capture capture(given.stream, given.model, given.tensors);
  llama_model* model = llama_model_load_from_file(given.model.c_str(), llama_model_default_params());
  if (!model) throw std::runtime_error(given.model + " is no model that llama.cpp can load");
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const auto length = static_cast<std::int32_t>(given.prompt.size());
  const auto room = -llama_tokenize(vocab, given.prompt.data(), length, nullptr, 0, true, false);
  std::vector<llama_token> tokens(room);
  llama_tokenize(vocab, given.prompt.data(), length, tokens.data(), room, true, false);

  llama_context_params parameters = llama_context_default_params();
  parameters.n_ctx = parameters.n_batch = static_cast<uint32_t>(tokens.size()) + given.new_tokens;
  parameters.type_k = parameters.type_v = given.cache_type;
  parameters.flash_attn_type = given.flash_attn;
  parameters.cb_eval = Capture::evaluated;
  parameters.cb_eval_user_data = &capture;
  llama_context* context = llama_init_from_model(model, parameters);
  if (!context) throw std::runtime_error("llama.cpp made no context for " + given.model);

  std::vector<llama_token> step = tokens;
  for (int i = 0; i < given.new_tokens; i++) {
    decode(context, capture, step, static_cast<llama_pos>(tokens.size() - step.size()));
    const float* logits = llama_get_logits_ith(context, -1);
    const auto best = std::max_element(logits, logits + llama_vocab_n_tokens(vocab)) - logits;
    step = {static_cast<llama_token>(best)};
    tokens.push_back(step[0]);
  }
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
