// The Python module, and the only file that knows pybind11: one line for each op. `ops.py` documents the arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/errors.h"
#include "core/python_tensor.h"

// --- draft
#include "draft/expand_tree.h"
#include "draft/extend_rows.h"
#include "draft/sample_draft.h"
#include "draft/select_topk.h"
// --- tree
#include "tree/build_tree.h"
#include "tree/build_tree_from_mask.h"
#include "tree/build_tree_from_parents.h"
#include "tree/merge_trees.h"
// --- layers
#include "layers/gate_rows.h"
#include "layers/linear_rows.h"
#include "layers/norm_rows.h"
#include "layers/pair_rows.h"
#include "layers/rotate_qkv.h"
// --- attention
#include "attention/tree_attention.h"
// --- verify
#include "verify/commit_tokens.h"
#include "verify/mask_stops.h"
#include "verify/score_tokens.h"
#include "verify/verify_tree.h"
// --- kv
#include "kv/alloc_pages.h"
#include "kv/copy_kv.h"
#include "kv/fork_pages.h"
#include "kv/free_pages.h"
#include "kv/move_kv.h"
#include "kv/write_kv.h"
// --- round
#include "round/apply_commands.h"
#include "round/publish_results.h"
// --- compat
#include "compat/linked_trees.h"
#include "compat/verify_chains.h"
#include "compat/verify_links.h"
// --- ngram
#include "ngram/ngram_index.h"
// --- scheduler
#include "scheduler/round_graphs.h"
#include "scheduler/scheduler.h"

namespace py = pybind11;
using namespace py::literals;

namespace pybind11::detail {

// Throws rather than returning false for a non-tensor: pybind11's overload error would print every argument, and a
// CUDA tensor's repr synchronises the device.
template <>
struct type_caster<specdec::TensorView> {
  static constexpr auto name = const_name("Tensor");
  bool load(handle src, bool) {
    if (!tensor_.load(src.ptr(), view_)) throw error_already_set();
    return true;
  }
  template <class>
  using cast_op_type = specdec::TensorView&;
  operator specdec::TensorView&() { return view_; }

 private:
  specdec::PyTensor tensor_;
  specdec::TensorView view_;
};

template <>
struct type_caster<specdec::OptTensor> {
  static constexpr auto name = const_name("Tensor | None");
  bool load(handle src, bool) {
    if (src.is_none()) return true;
    if (!tensor_.load(src.ptr(), value_.emplace())) throw error_already_set();
    return true;
  }
  template <class>
  using cast_op_type = specdec::OptTensor&;
  operator specdec::OptTensor&() { return value_; }

 private:
  specdec::PyTensor tensor_;
  specdec::OptTensor value_;
};

// Taken apart here, which is quicker than six arguments from Python.
template <>
struct type_caster<specdec::PoolTensors> {
  static constexpr auto name = const_name("PagePool");
  bool load(handle src, bool convert) {
    if (!PyTuple_Check(src.ptr()) || PyTuple_GET_SIZE(src.ptr()) != kTensors + 1)
      throw specdec::TypeError(std::string("expected a PagePool, got ") + Py_TYPE(src.ptr())->tp_name);
    for (int i = 0; i < kTensors; ++i)
      if (!tensors_[i].load(PyTuple_GET_ITEM(src.ptr(), i), views_[i])) throw error_already_set();
    make_caster<int64_t> page_size;
    if (!page_size.load(PyTuple_GET_ITEM(src.ptr(), kTensors), convert)) return false;
    value_.page_size = cast_op<int64_t>(page_size);
    return true;
  }
  template <class>
  using cast_op_type = specdec::PoolTensors&;
  operator specdec::PoolTensors&() { return value_; }

 private:
  static constexpr int kTensors = 5;
  specdec::PyTensor tensors_[kTensors];
  specdec::TensorView views_[kTensors];
  specdec::PoolTensors value_{views_[0], views_[1], views_[2], views_[3], views_[4], 0};
};

template <>
struct type_caster<specdec::CallStream> {
  static constexpr auto name = const_name("int | None");
  type_caster() = default;
  ~type_caster() {
    if (value_.given) specdec::set_call_stream({});  // the call is over
  }
  bool load(handle src, bool convert) {
    if (!src.is_none()) {
      make_caster<intptr_t> raw;
      if (!raw.load(src, convert))
        throw specdec::TypeError(std::string("expected stream to be None or a raw cudaStream_t as an int, got ") +
                                 Py_TYPE(src.ptr())->tp_name);
      value_ = {true, reinterpret_cast<void*>(cast_op<intptr_t>(raw))};
      specdec::set_call_stream(value_);
    }
    return true;
  }
  template <class>
  using cast_op_type = specdec::CallStream;
  operator specdec::CallStream() { return value_; }

 private:
  specdec::CallStream value_;
};

}  // namespace pybind11::detail

namespace {

template <class Error>
void raise_as(PyObject* type) {
  static PyObject* python_type;
  python_type = type;
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& e) {
      PyErr_SetString(python_type, e.what());
    }
  });
}

// --- ops: functions of C (METH_FASTCALL) that read their arguments with pybind11's casters. Its own dispatcher looks
// for overloads, keywords and defaults, which ops do not have, for as long as it takes to read a tensor.

template <class T>
constexpr const char* kTypeName = "tensor";  // whose caster says so itself
template <>
constexpr const char* kTypeName<specdec::PoolTensors> = "PagePool";
template <>
constexpr const char* kTypeName<int64_t> = "int of 64 bits";
template <>
constexpr const char* kTypeName<std::optional<int64_t>> = "int of 64 bits or None";
template <>
constexpr const char* kTypeName<double> = "float";
template <>
constexpr const char* kTypeName<std::optional<double>> = "float or None";
template <>
constexpr const char* kTypeName<bool> = "bool";
template <>
constexpr const char* kTypeName<std::string> = "str";

template <class T>
decltype(auto) read_argument(py::detail::make_caster<T>& caster, PyObject* object, const char* op, size_t i) {
  if (!caster.load(object, true))
    throw specdec::TypeError(std::string(op) + ": argument " + std::to_string(i) + " is of type " +
                             Py_TYPE(object)->tp_name + ", expected " + kTypeName<std::decay_t<T>>);
  return py::detail::cast_op<T>(caster);
}

template <class... Args>
struct Arguments {
  // Reads them and calls `function` with them.
  template <class Function>
  static PyObject* pass_to(const Function& function, const char* op, PyObject* const* objects,
                           Py_ssize_t num_objects) try {
    if (num_objects != sizeof...(Args))
      throw specdec::TypeError(std::string(op) + ": " + std::to_string(num_objects) + " arguments, expected " +
                               std::to_string(sizeof...(Args)));
    return pass_to(function, op, objects, std::index_sequence_for<Args...>());
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (...) {
    py::detail::try_translate_exceptions();
    return nullptr;
  }

 private:
  template <class Function, size_t... I>
  static PyObject* pass_to(const Function& function, const char* op, PyObject* const* objects,
                           std::index_sequence<I...>) {
    std::tuple<py::detail::make_caster<Args>...> casters;
    std::tuple<decltype(read_argument<Args>(std::get<I>(casters), nullptr, nullptr, 0))...> arguments{
        read_argument<Args>(std::get<I>(casters), objects[I], op, I)...};  // braces: in this order
    if constexpr (std::is_void_v<decltype(std::apply(function, arguments))>) {
      std::apply(function, arguments);
      Py_RETURN_NONE;
    } else {
      return py::cast(std::apply(function, arguments)).release().ptr();
    }
  }
};

template <auto function>
struct Op;

template <class Result, class... Args, Result (*function)(Args...)>
struct Op<function> {
  static inline PyMethodDef method;

  static PyObject* call(PyObject*, PyObject* const* objects, Py_ssize_t num_objects) {
    return Arguments<Args...>::pass_to(function, method.ml_name, objects, num_objects);
  }
};

// A method, which runs without the GIL.
template <class Class, class... Args, void (Class::*function)(Args...)>
struct Op<function> {
  static inline PyMethodDef method;

  static PyObject* call(PyObject* self, PyObject* const* objects, Py_ssize_t num_objects) {
    const auto run = [&](auto&&... arguments) {
      auto& object = py::cast<Class&>(py::handle(self));
      const py::gil_scoped_release release;
      (object.*function)(arguments...);
    };
    return Arguments<Args...>::pass_to(run, method.ml_name, objects, num_objects);
  }
};

template <auto function>
PyMethodDef* method_of(const char* name, const char* doc) {
  Op<function>::method = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Op<function>::call)),
                          METH_FASTCALL, doc};
  return &Op<function>::method;
}

template <auto function>
void def_op(py::module_& m, const char* name, const char* doc) {
  PyObject* op = PyCFunction_NewEx(method_of<function>(name, doc), nullptr, m.attr("__name__").ptr());
  m.add_object(name, py::reinterpret_steal<py::object>(op));
}

template <auto function>
void def_method(py::handle type, const char* name, const char* doc) {
  PyObject* method = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), method_of<function>(name, doc));
  py::setattr(type, name, py::reinterpret_steal<py::object>(method));
}

template <class... Tensors>
int64_t noop(specdec::CallStream, const Tensors&... tensors) {
  return (tensors.ndim() + ...);
}

// --- scheduler: the loop runs without the GIL, and takes it for each call of the Python executor.

using specdec::scheduler::Chunk;
using specdec::scheduler::Emission;
using specdec::scheduler::Emissions;
using specdec::scheduler::RoundGraphs;
using specdec::scheduler::Tokens;

class PyExecutor : public specdec::scheduler::Executor {
 public:
  // `graphs` may be null: then every launch is a Python call, after which the device is at rest or asked by `progress`.
  PyExecutor(py::object object, std::unique_ptr<RoundGraphs> graphs)
      : object_(std::move(object)), graphs_(std::move(graphs)) {}
  py::object& object() { return object_; }

  void begin(int32_t slot, int64_t request_id, Tokens text) override { call("begin", slot, request_id, text); }
  void prefill(std::span<const Chunk> chunks) override {
    py::gil_scoped_acquire gil;
    py::list list;
    for (const Chunk& chunk : chunks) list.append(py::make_tuple(chunk.slot, chunk.start, argument(chunk.tokens)));
    object_.attr("prefill")(list);
  }
  void activate(std::span<const int32_t> slots) override { call("activate", slots); }
  void launch(int64_t batch, int64_t num_nodes) override {
    if (!graphs_ || !graphs_->launch(batch, num_nodes)) call("launch", batch, num_nodes);
  }
  void deactivate(std::span<const int32_t> slots) override { call("deactivate", slots); }
  void emit(const Emissions& emissions) override {
    py::gil_scoped_acquire gil;
    py::list list;
    const int32_t* tokens = emissions.tokens.data();
    for (const Emission& e : emissions.each) {
      py::list new_tokens(e.num_tokens);
      for (int64_t i = 0; i < e.num_tokens; ++i) new_tokens[i] = *tokens++;
      py::object scores = py::none();
      if (e.scores) scores = py::make_tuple(e.scores->logprobs, e.scores->top_ids, e.scores->top_logprobs);
      list.append(py::make_tuple(e.request_id, std::move(new_tokens), static_cast<int32_t>(e.reason), e.counts.rounds,
                                 e.counts.drafted, e.counts.accepted, e.status, std::move(scores)));
    }
    object_.attr("emit")(list);
  }
  bool busy() override { return graphs_ && graphs_->busy(); }
  specdec::scheduler::Progress progress() override {
    py::gil_scoped_acquire gil;
    const auto [applied, published] = object_.attr("progress")().cast<std::pair<int64_t, int64_t>>();
    return {applied, published};
  }

 private:
  template <class... Args>
  void call(const char* method, const Args&... args) {
    py::gil_scoped_acquire gil;
    object_.attr(method)(argument(args)...);
  }
  template <class T>
  static const T& argument(const T& value) {
    return value;
  }
  static std::vector<int32_t> argument(Tokens tokens) { return {tokens.begin(), tokens.end()}; }

  py::object object_;
  std::unique_ptr<RoundGraphs> graphs_;
};

// A scheduler that owns what it refers to: the executor, and the rings.
struct Referred {
  PyExecutor executor;
  py::tuple rings;
};
struct PyScheduler : private Referred, public specdec::scheduler::Scheduler {
  PyScheduler(py::object executor, std::unique_ptr<RoundGraphs> graphs, py::tuple rings,
              const specdec::scheduler::Config& config, const specdec::scheduler::RingMemory& commands,
              const specdec::scheduler::RingMemory& results, bool traces)
      : Referred{PyExecutor(std::move(executor), std::move(graphs)), std::move(rings)},
        Scheduler(config, Referred::executor, commands, results, traces) {}
  py::object& executor_object() { return Referred::executor.object(); }
};

// An engine is its scheduler's executor and owns it: the garbage collector has to see that circle.
void collect_executor(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (py::detail::is_holder_constructed(self))
      Py_VISIT(py::cast<PyScheduler&>(py::handle(self)).executor_object().ptr());
    return 0;
  };
  type.tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self))
      py::cast<PyScheduler&>(py::handle(self)).executor_object() = py::object();
    return 0;
  };
}

// Raises what a signal handler raised, such as KeyboardInterrupt. Asked for after every turn, it looks now and then:
// another thread may hold the GIL for longer than a round takes.
class SignalCheck {
 public:
  void operator()() {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    next_ = now + std::chrono::milliseconds(50);
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }

 private:
  std::chrono::steady_clock::time_point next_;
};

// The tokens of a list of ints or of an int32 tensor on the CPU.
std::vector<int64_t> token_list(const char* name, const py::object& tokens) {
  if (py::isinstance<py::list>(tokens) || py::isinstance<py::tuple>(tokens)) {
    try {
      return tokens.cast<std::vector<int64_t>>();
    } catch (const py::cast_error&) {
      throw specdec::TypeError(std::string("submit: ") + name + " holds other things, expected ints");
    }
  }
  specdec::PyTensor tensor;
  specdec::TensorView view;
  if (!tensor.load(tokens.ptr(), view)) throw py::error_already_set();
  specdec::Check check("submit");
  specdec::Dim length{"length"};
  check.tensor(name, view, {length}, specdec::kInt32);
  check.require_cpu();
  const auto* data = view.data<int32_t>();
  return {data, data + length};
}

std::unique_ptr<PyScheduler> make_scheduler(py::object executor, int64_t num_slots, int64_t num_pages,
                                            int64_t page_size, int64_t max_len, int64_t reserve, int64_t accept_width,
                                            int64_t max_stops, int64_t max_logprobs, int64_t prefill_chunk,
                                            int64_t prefill_requests, int64_t rounds_in_flight,
                                            std::vector<int64_t> batch_sizes, std::vector<int64_t> nodes,
                                            const py::object& commands, const py::object& results,
                                            std::optional<intptr_t> stream,
                                            const std::map<std::pair<int64_t, int64_t>, intptr_t>& graphs, bool trace) {
  const specdec::scheduler::Config config{.num_slots = num_slots,
                                          .num_pages = num_pages,
                                          .page_size = page_size,
                                          .max_len = max_len,
                                          .reserve = reserve,
                                          .accept_width = accept_width,
                                          .max_stops = max_stops,
                                          .max_logprobs = max_logprobs,
                                          .prefill_chunk = prefill_chunk,
                                          .prefill_requests = prefill_requests,
                                          .rounds_in_flight = rounds_in_flight,
                                          .batch_sizes = std::move(batch_sizes),
                                          .nodes = std::move(nodes)};
  specdec::scheduler::check_config(config);
  specdec::Check check("Scheduler");
  const auto ring = [&](const char* name, const py::object& object, int64_t min_depth, int64_t min_width) {
    specdec::PyTensor tensor;
    specdec::TensorView view;
    if (!tensor.load(object.ptr(), view)) throw py::error_already_set();
    specdec::Dim depth{"depth"}, width{"width"};
    check.output(name, view, {depth, width}, specdec::kInt32);
    check.require_cpu();
    check.range((std::string(name) + ".shape[0]").c_str(), depth, min_depth, std::numeric_limits<int32_t>::max());
    check.range((std::string(name) + ".shape[1]").c_str(), width, min_width, std::numeric_limits<int32_t>::max());
    return specdec::scheduler::RingMemory{view.data<int32_t>(), depth, width};
  };
  const specdec::CommandLayout command_layout{config.max_batch(), num_slots, max_stops};
  const auto command_ring = ring("commands", commands, 2, command_layout.words());
  const specdec::ResultLayout result_layout{accept_width, max_logprobs};
  const auto result_ring = ring("results", results, rounds_in_flight + 1, result_layout.words(config.max_batch()));

  check.that(stream || graphs.empty(), "stream", "is None", "the stream that graphs are launched on");
  std::unique_ptr<RoundGraphs> round_graphs;
  if (stream) round_graphs = std::make_unique<RoundGraphs>(reinterpret_cast<CUstream_st*>(*stream));
  for (const auto& [size, graph] : graphs)
    round_graphs->add(size.first, size.second, reinterpret_cast<CUgraph_st*>(graph));
  return std::make_unique<PyScheduler>(std::move(executor), std::move(round_graphs), py::make_tuple(commands, results),
                                       config, command_ring, result_ring, trace);
}

}  // namespace

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  using namespace specdec;
  raise_as<TypeError>(PyExc_TypeError);
  raise_as<ValueError>(PyExc_ValueError);
  raise_as<NotImplementedError>(PyExc_NotImplementedError);
  raise_as<CudaError>(PyExc_RuntimeError);

  m.attr("version") = SPECDEC_VERSION;
#ifdef SPECDEC_WITH_CUDA
  m.attr("cuda_version") = SPECDEC_CUDA_VERSION;
  m.attr("cuda_architectures") = SPECDEC_CUDA_ARCHITECTURES;
#else
  m.attr("cuda_version") = py::none();
  m.attr("cuda_architectures") = py::none();
#endif

  // --- draft
  def_op<&select_topk>(m, "select_topk", "log-softmax and top-k of each row of logits");
  def_op<&sample_draft>(m, "sample_draft", "draws without replacement from each row of draft logits");
  def_op<&expand_root>(m, "expand_root", "draft step 1: the root's children become candidates and frontier");
  def_op<&expand_tree>(m, "expand_tree", "a later draft step: append children, keep the best k as the frontier");
  def_op<&extend_rows>(m, "extend_rows", "the rows of draft-extend, from what a round accepted");

  // --- tree
  def_op<&build_tree>(m, "build_tree", "the best candidates as a tree with links, mask and positions");
  def_op<&build_tree_from_parents>(m, "build_tree_from_parents", "links, mask and positions from parent pointers");
  def_op<&build_tree_from_mask>(m, "build_tree_from_mask", "links, mask and positions from an ancestor mask");
  def_op<&merge_trees>(m, "merge_trees", "the union of two draft trees, cut to its best nodes");

  // --- layers
  def_op<&norm_rows>(m, "norm_rows", "rows, or sums of rows, over their root mean square");
  def_op<&pair_rows>(m, "pair_rows", "embeddings beside features, each row over its root mean square");
  def_op<&gate_rows>(m, "gate_rows", "silu(gate) * up of rows that hold both");
  def_op<&linear_rows>(m, "linear_rows", "a few rows times a weight");
  m.def("has_wgmma", &has_wgmma, "whether the CUDA device that is current has wgmma, and this build its instructions");
  m.def("many_rows_fill", &many_rows_fill,
        "whether so many rows by a weight of so many are enough for the kernel of many rows, on the CUDA device that "
        "is current");
  def_op<&rotate_qkv>(m, "rotate_qkv", "normalise and rotate query and key heads, write keys and values to pages");

  // --- attention
  def_op<&tree_attention>(m, "tree_attention", "attention over a paged KV prefix and a tail of tree nodes");
  def_op<&tree_attention_workspace>(m, "tree_attention_workspace",
                                    "floats of workspace that a tree_attention call needs");

  // --- verify
  def_op<&verify_tree>(m, "verify_tree", "accepted drafts and bonus token, straight from the target's logits");
  def_op<&mask_stops>(m, "mask_stops", "no stop tokens where it is too early for them");
  def_op<&score_tokens>(m, "score_tokens", "log-probabilities of emitted tokens and of the best alternatives");
  def_op<&commit_tokens>(m, "commit_tokens", "cut emitted tokens at stop tokens and limits, advance the slots");

  // --- kv
  def_op<&alloc_pages>(m, "alloc_pages", "top page tables up to the rows about to be written");
  def_op<&free_pages>(m, "free_pages", "take back the pages beyond the rows that slots keep");
  def_op<&fork_pages>(m, "fork_pages", "give empty slots the first rows of other slots, by reference");
  def_op<&write_kv>(m, "write_kv", "scatter the valid rows of new K and V into the slots' pages");
  def_op<&move_kv>(m, "move_kv", "bring the KV rows of an accepted path together, in every layer");
  def_op<&copy_kv>(m, "copy_kv", "copy rows of one slot to the same rows of another, in every layer");

  // --- round
  def_op<&apply_commands>(m, "apply_commands", "the host's next record of commands becomes slot state");
  def_op<&publish_results>(m, "publish_results", "what a round did, as the next record of the host's ring");

  // --- compat: under the names that other engines call them by
  def_op<&build_tree_kernel_efficient>(m, "build_tree_kernel_efficient", "SGLang's tree from chosen candidates");
  def_op<&reconstruct_indices_from_tree_mask>(m, "reconstruct_indices_from_tree_mask", "SGLang's links from a mask");
  def_op<&verify_tree_greedy>(m, "verify_tree_greedy", "SGLang's walk along the target's argmax");
  def_op<&tree_speculative_sampling_target_only>(m, "tree_speculative_sampling_target_only", "SGLang's sampled walk");
  def_op<&chain_speculative_sampling>(m, "chain_speculative_sampling", "SGLang's rejection sampling of chains");
  def_op<&rejection_sample>(m, "rejection_sample", "vLLM's rejection sampling of ragged chains");

  // --- ngram
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<NgramIndex> index(m, "NgramIndex", "n-gram index: drafts from text seen before");
  def_method<&NgramIndex::extend>(index, "extend", "what a round has added to the streams of its slots");
  def_method<&NgramIndex::draft>(index, "draft", "trees of what may follow the streams of slots");
  index.def(py::init<int64_t, int64_t, int64_t, int64_t, const OptTensor&>(), Release())
      .def_static("load", &NgramIndex::load, Release())
      .def("save", &NgramIndex::save, Release())
      .def("copy", &NgramIndex::copy, Release())
      .def("begin", &NgramIndex::begin, Release())
      .def("length", &NgramIndex::length, Release())
      .def("insert", &NgramIndex::insert, Release())
      .def("release", &NgramIndex::release, Release())
      .def("clear", &NgramIndex::clear, Release())
      .def("statistics",
           [](const NgramIndex& index) {
             const auto [h, capacity] = index.statistics();
             const double load = static_cast<double>(h.entries) / static_cast<double>(capacity);
             return py::make_tuple(h.inserted, h.held, h.entries, load, h.evictions, h.drafts, h.matches, h.drafted,
                                   std::to_array(h.rounds_by_match), std::to_array(h.accepted_by_match), h.refused);
           })
      .def("digest", &NgramIndex::digest, Release())
      .def_property_readonly("num_bytes", &NgramIndex::num_bytes)
      .def_property_readonly("device_words", &NgramIndex::device_words);

  // --- scheduler
  using specdec::scheduler::RoundCosts;
  py::class_<RoundCosts>(m, "RoundCosts", "what rounds cost, in microseconds, by batch and number of nodes")
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>, std::vector<std::vector<double>>>(), "batches"_a,
           "nodes"_a, "us"_a)
      .def_readonly("batches", &RoundCosts::batches)
      .def_readonly("nodes", &RoundCosts::nodes)
      .def_readonly("us", &RoundCosts::us)
      .def(
          "choose_num_nodes",
          [](const RoundCosts& costs, int64_t batch, const std::vector<double>& accepted) {
            return specdec::scheduler::choose_num_nodes(batch, accepted, costs);
          },
          "batch"_a, "accepted"_a);
  using Seconds = std::chrono::duration<double>;
  py::class_<PyScheduler>(m, "Scheduler", py::custom_type_setup(collect_executor))
      .def(py::init(&make_scheduler), "executor"_a, py::kw_only(), "num_slots"_a, "num_pages"_a, "page_size"_a,
           "max_len"_a, "reserve"_a, "accept_width"_a, "max_stops"_a, "max_logprobs"_a = -1, "prefill_chunk"_a,
           "prefill_requests"_a, "rounds_in_flight"_a, "batch_sizes"_a, "nodes"_a, "commands"_a, "results"_a,
           "stream"_a = py::none(), "graphs"_a = py::dict(), "trace"_a = false)
      .def(
          "submit",
          [](PyScheduler& s, const py::object& prompt, int64_t max_new_tokens, const py::object& stop_tokens,
             float temperature, int32_t top_k, float top_p, float min_p, int64_t seed, int64_t min_new_tokens,
             int64_t num_logprobs, bool streams) {
            return s.submit(token_list("prompt", prompt), {.max_new_tokens = max_new_tokens,
                                                           .stop_tokens = token_list("stop_tokens", stop_tokens),
                                                           .sampling = {temperature, top_k, top_p, min_p, seed},
                                                           .streams = streams,
                                                           .min_new_tokens = min_new_tokens,
                                                           .num_logprobs = num_logprobs});
          },
          "prompt"_a, "max_new_tokens"_a, "stop_tokens"_a = py::tuple(), py::kw_only(), "temperature"_a = 0.0f,
          "top_k"_a = 0, "top_p"_a = 1.0f, "min_p"_a = 0.0f, "seed"_a = 0, "min_new_tokens"_a = 0,
          "num_logprobs"_a = -1, "streams"_a = true)
      .def("cancel", &PyScheduler::cancel)
      .def("abort_all", &PyScheduler::abort_all)
      .def("measure_rounds", &PyScheduler::measure_rounds, Release())
      .def("step", &PyScheduler::step, Release())
      .def(
          "run_until_idle", [](PyScheduler& s) { s.run_until_idle(SignalCheck()); }, Release())
      .def(
          "wait_for_work", [](PyScheduler& s, double seconds) { return s.wait_for_work(Seconds(seconds)); },
          "timeout"_a, Release())
      .def(
          "drain", [](PyScheduler& s, double seconds) { return s.drain(Seconds(seconds)); }, "timeout"_a, Release())
      .def_property_readonly("num_running", &PyScheduler::num_running)
      .def_property_readonly("num_waiting", &PyScheduler::num_waiting)
      .def_property_readonly("num_free_pages_estimate", &PyScheduler::num_free_pages_estimate)
      .def_property_readonly("num_retractions", &PyScheduler::num_retractions)
      .def_property_readonly("times",
                             [](const PyScheduler& s) {
                               const auto t = s.recorder().totals();
                               return py::make_tuple(t.rounds, t.rows, t.host, t.wait, t.prefill, t.emit, t.device,
                                                     t.following, t.gaps);
                             })
      .def_property_readonly("rounds_by_rung", [](const PyScheduler& s) { return s.recorder().rounds_by_rung(); })
      .def_property_readonly("costs", [](const PyScheduler& s) { return s.ladder().costs(); })
      .def("write_trace", [](const PyScheduler& s, const std::string& path) { s.recorder().write_trace(path); });

  // --- what `specdec bench call_overhead` times: the boundary alone
  using T = TensorView;
  def_op<&noop<T>>(m, "noop1", "takes one tensor");
  def_op<&noop<T, T, T, T>>(m, "noop4", "takes four tensors");
  def_op<&noop<T, T, T, T, T, T, T, T>>(m, "noop8", "takes eight tensors");
}
