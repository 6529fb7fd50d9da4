// Binds the scheduler. Its loop runs without the GIL, and takes it for each call of the Python executor.
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/casters.h"
#include "python/fields.h"
#include "python/gil.h"
#include "python/module.h"
#include "python/named_tuple.h"
#include "python/python_executor.h"
#include "python/rings.h"
#include "scheduler/scheduler.h"

namespace specdec::python {
namespace {

namespace py = pybind11;
using namespace py::literals;

// A scheduler that owns the executor, the rings and the channel to other ranks.
struct Referred {
  PyExecutor executor;
  py::tuple rings;
};
struct PyScheduler : private Referred, public scheduler::Scheduler {
  PyScheduler(py::object executor, std::unique_ptr<RoundGraphs> graphs, py::tuple rings,
              const scheduler::Config& config, const scheduler::RingMemory& commands,
              const scheduler::RingMemory& results, bool traces)
      : Referred{PyExecutor(std::move(executor), std::move(graphs)), std::move(rings)},
        Scheduler(config, Referred::executor, commands, results, traces) {}
  py::object& executor_object() { return Referred::executor.object(); }
  void set_graphs(const std::map<RoundGraphs::Size, std::vector<intptr_t>>& graphs) {
    Referred::executor.set_graphs(graphs);
  }
  void record_launches(const scheduler::LaunchWriter& writer) { Referred::executor.record_launches(writer); }
  void reset_rounds() {
    Scheduler::reset_rounds();
    Referred::executor.reset_records();
  }
};

}  // namespace
}  // namespace specdec::python

template <>
struct pybind11::detail::type_caster<specdec::python::PyScheduler> : initialised_caster<specdec::python::PyScheduler> {
};
template <>
struct pybind11::detail::type_caster<specdec::scheduler::Submission>
    : initialised_caster<specdec::scheduler::Submission> {};
template <>
struct pybind11::detail::type_caster<specdec::scheduler::RoundCosts>
    : initialised_caster<specdec::scheduler::RoundCosts> {};

namespace specdec::python {
namespace {

// Shows the garbage collector the reference cycle: an engine owns its scheduler, whose executor it is.
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

// Returns the Python object of an exception of an executor call.
py::object python_exception(const std::exception_ptr& error) {
  if (!error) return py::none();
  try {
    std::rethrow_exception(error);
  } catch (const py::error_already_set& exception) {
    return exception.value();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return py::error_already_set().value();
}

using UpdateType = NamedTuple<10>;
using TimesType = NamedTuple<8>;

// Returns the updates since the last call. With `wait`: at least one, or None once the loop has ended and all updates
// are taken.
py::object take(const UpdateType& make_update, PyScheduler& scheduler, bool wait) {
  bool has_more = true;
  if (wait) {
    const WithoutGil released;
    has_more = scheduler.updates().wait();
  }
  if (!has_more) return py::none();
  const scheduler::RequestUpdates updates = scheduler.updates().take();
  py::list list(updates.each.size());
  const int32_t* tokens = updates.tokens.data();
  for (size_t i = 0; i < updates.each.size(); ++i) {
    const scheduler::RequestUpdate& update = updates.each[i];
    py::list new_tokens(update.num_tokens);
    for (int64_t j = 0; j < update.num_tokens; ++j) new_tokens[j] = *tokens++;
    py::object scores = py::none();
    if (update.scores)
      scores = py::make_tuple(update.scores->logprobs, update.scores->top_ids, update.scores->top_logprobs);
    const scheduler::RoundCounts& counts = update.counts;
    list[i] = make_update(update.request_id, std::move(new_tokens), static_cast<int32_t>(update.reason), counts.rounds,
                          counts.drafted, counts.accepted, counts.cached, update.status, std::move(scores),
                          python_exception(update.error));
  }
  return list;
}

// Returns the tokens of a field of a Submission: a list of ints or an int32 tensor on the CPU.
std::vector<int64_t> token_list(const char* name, const py::object& tokens) {
  if (py::isinstance<py::list>(tokens) || py::isinstance<py::tuple>(tokens)) {
    try {
      return tokens.cast<std::vector<int64_t>>();
    } catch (const py::cast_error&) {
      throw TypeError(std::string("Submission: ") + name + " holds other things, expected ints");
    }
  }
  PyTensor tensor;
  const TensorView view = named_tensor("Submission", name, tokens, tensor);
  Check check("Submission");
  Dim length{"length"};
  check.tensor(name, view, {length}, kInt32);
  check.require_cpu();
  const auto* data = view.data<int32_t>();
  return {data, data + length};
}

// Holds a Python object where the GIL is not held; null for None.
std::shared_ptr<void> held(py::object object) {
  if (object.is_none()) return nullptr;
  return {object.release().ptr(), [](void* pointer) {
            const WithGil gil;
            Py_DECREF(static_cast<PyObject*>(pointer));
          }};
}

std::unique_ptr<PyScheduler> make_scheduler(py::object executor, const scheduler::Config& config,
                                            const py::object& commands, const py::object& results,
                                            std::optional<intptr_t> stream,
                                            const std::map<RoundGraphs::Size, std::vector<intptr_t>>& graphs,
                                            bool trace, const py::object& channel) {
  scheduler::check_config(config);
  Check check("Scheduler");
  const RingsOf memory("Scheduler", config, commands, results);
  check.that(stream || graphs.empty(), "stream", "is None", "the stream that graphs are launched on");
  std::unique_ptr<RoundGraphs> round_graphs;
  if (stream) round_graphs = std::make_unique<RoundGraphs>(reinterpret_cast<CUstream_st*>(*stream));
  auto made = std::make_unique<PyScheduler>(std::move(executor), std::move(round_graphs),
                                            py::make_tuple(commands, results, channel), config, memory.commands,
                                            memory.results, trace);
  if (!channel.is_none())
    made->record_launches({channel.cast<scheduler::ReplayChannel&>(), memory.commands, memory.command_layout,
                           memory.results, memory.result_layout});
  if (!graphs.empty()) made->set_graphs(graphs);
  return made;
}

}  // namespace

void add_scheduler(py::module_& m) {
  using scheduler::RoundCosts;
  py::class_<RoundCosts>(m, "RoundCosts", "what rounds cost, in microseconds, by batch size and rows in all")
      .def(py::init<std::vector<int64_t>, std::vector<std::vector<int64_t>>, std::vector<std::vector<double>>,
                    std::vector<double>>(),
           "batches"_a, "rows"_a, "us"_a, "catch_up"_a = std::vector<double>())
      .def_readonly("batches", &RoundCosts::batches)
      .def_readonly("rows", &RoundCosts::rows)
      .def_readonly("us", &RoundCosts::us)
      .def_readonly("catch_up", &RoundCosts::catch_up);
  using scheduler::Budget;
  using scheduler::BudgetConstants;
  py::class_<BudgetConstants>(m, "BudgetConstants", "the tuned numbers of a budget")
      .def(py::init())
      .def_readwrite("gain_window", &BudgetConstants::gain_window)
      .def_readwrite("correction_window", &BudgetConstants::correction_window)
      .def_readwrite("min_window_rounds", &BudgetConstants::min_window_rounds)
      .def_readwrite("optimism", &BudgetConstants::optimism)
      .def_readwrite("correction_prior", &BudgetConstants::correction_prior)
      .def_readwrite("max_correction", &BudgetConstants::max_correction)
      .def_readwrite("explore_time_share", &BudgetConstants::explore_time_share)
      .def_readwrite("explore_loss_share", &BudgetConstants::explore_loss_share)
      .def_readwrite("explore_rounds", &BudgetConstants::explore_rounds)
      .def_readwrite("explore_max_cost", &BudgetConstants::explore_max_cost)
      .def_readwrite("retime_time_share", &BudgetConstants::retime_time_share)
      .def_readwrite("retime_loss_share", &BudgetConstants::retime_loss_share)
      .def_readwrite("switch_margin", &BudgetConstants::switch_margin);
  py::class_<Budget>(m, "Budget", "chooses how many rows rounds get")
      .def(py::init([](const RoundCosts& costs, int64_t accept_width, int64_t max_idle_rounds,
                       const BudgetConstants& constants, std::vector<std::vector<int64_t>> drafted) {
             auto budget = std::make_unique<Budget>(costs.batches, costs.rows, accept_width, max_idle_rounds, constants,
                                                    std::move(drafted));
             budget->set_costs(costs);
             return budget;
           }),
           "costs"_a, "accept_width"_a, "max_idle_rounds"_a = 0, "constants"_a = BudgetConstants(),
           "drafted"_a = std::vector<std::vector<int64_t>>())
      .def("next_level", &Budget::next_level, "size_index"_a, "num_requests"_a, "kv_rows"_a, "draft_lag"_a = 0.0)
      .def("update_cost", &Budget::update_cost, "size_index"_a, "level"_a, "num_requests"_a, "kv_rows"_a, "us"_a)
      .def(
          "update_gain",
          [](Budget& budget, size_t size_index, size_t level, double num_requests, const std::vector<double>& predicted,
             const std::vector<double>& observed) {
            const auto count = static_cast<int64_t>(predicted.size());
            Check("update_gain").range("observed (how many)", static_cast<int64_t>(observed.size()), 1, count);
            budget.update_gain(size_index, level, num_requests, predicted, observed);
          },
          "size_index"_a, "level"_a, "num_requests"_a, "predicted"_a, "observed"_a)
      .def("expected_tokens", &Budget::expected_tokens, "size_index"_a, "level"_a, "num_requests"_a);
  using Cache = scheduler::PrefixCache;
  const auto locked = [](Cache& cache, Cache::Node* node) {
    cache.lock(node);
    return py::make_tuple(reinterpret_cast<intptr_t>(node), Cache::places(node));
  };
  using Text = std::vector<int32_t>;
  py::class_<Cache>(m, "PrefixCache", "the scheduler's radix tree of cached pages")
      .def(py::init<int64_t, int64_t, int64_t, int64_t>(), "num_places"_a, "page_size"_a, "num_snapshots"_a = 0,
           "lookahead"_a = 1)
      .def(
          "find",
          [=](Cache& cache, const Text& text, int64_t most_pages) {
            return locked(cache, cache.find(text, most_pages));
          },
          "text"_a, "most_pages"_a)
      .def(
          "insert",
          [=](Cache& cache, const Text& text, int64_t pages) { return locked(cache, cache.insert(text, pages)); },
          "text"_a, "pages"_a)
      .def(
          "find_snapshot",
          [](Cache& cache, const Text& text, int64_t most_pages) {
            const Cache::Node* node = cache.find_snapshot(text, most_pages);
            return std::pair(Cache::num_pages(node), Cache::snapshot(node));
          },
          "text"_a, "most_pages"_a)
      .def("take_snapshot", &Cache::take_snapshot)
      .def(
          "keep_snapshot",
          [](Cache& cache, const Text& text, int64_t pages, int32_t snapshot) {
            cache.keep_snapshot(text, pages, snapshot);
          },
          "text"_a, "pages"_a, "snapshot"_a)
      .def(
          "unlock", [](Cache& cache, intptr_t node) { cache.unlock(reinterpret_cast<Cache::Node*>(node)); }, "node"_a)
      .def("evict", &Cache::evict, "count"_a)
      .def("clear", &Cache::clear)
      .def_property_readonly("size", &Cache::size)
      .def_property_readonly("num_locked", &Cache::num_locked)
      .def_property_readonly("num_snapshots", &Cache::num_snapshots)
      .def_property_readonly("num_evicted_snapshots", &Cache::num_evicted_snapshots);
  m.def(
      "command_words",
      [](int64_t max_batch, int64_t num_slots, int64_t max_stops) {
        return round::CommandLayout{max_batch, num_slots, max_stops}.words();
      },
      "max_batch"_a, "num_slots"_a, "max_stops"_a, "int32 words of a record of commands");
  m.def(
      "result_words",
      [](int64_t max_batch, int64_t accept_width, int64_t num_levels, int64_t max_logprobs) {
        return round::ResultLayout{accept_width, num_levels, max_logprobs}.words(max_batch);
      },
      "max_batch"_a, "accept_width"_a, "num_levels"_a, "max_logprobs"_a,
      "int32 words of a record of results; max_logprobs -1: without scores");
  m.attr("CATCH_UP") = scheduler::kCatchUp;
  m.attr("FIRST_ROUND") = scheduler::kFirstRound;
  using scheduler::Config;
  py::class_<Config> config(m, "SchedulerConfig", "the sizes that a scheduler works with");
  def_fields(config, required("num_slots", &Config::num_slots), required("num_pages", &Config::num_pages),
             required("page_size", &Config::page_size), optional("window", &Config::window),
             optional("vocab_size", &Config::vocab_size), required("max_len", &Config::max_len),
             required("reserve", &Config::reserve), required("accept_width", &Config::accept_width),
             required("max_stops", &Config::max_stops), optional("max_logprobs", &Config::max_logprobs),
             required("prefill_chunk", &Config::prefill_chunk), required("prefill_requests", &Config::prefill_requests),
             required("rounds_in_flight", &Config::rounds_in_flight),
             optional("draft_can_idle", &Config::draft_can_idle), optional("prefix_cache", &Config::prefix_cache),
             optional("num_snapshots", &Config::num_snapshots), optional("snapshot_pages", &Config::snapshot_pages),
             optional("lookahead", &Config::lookahead), required("batch_sizes", &Config::batch_sizes),
             required("rows", &Config::rows), optional("drafted", &Config::drafted),
             optional("plain_rounds", &Config::plain_rounds), optional("max_idle_rounds", &Config::max_idle_rounds));
  config.def_property_readonly("num_levels", &Config::num_levels)
      .def_property_readonly("max_batch", &Config::max_batch);
  using scheduler::Sampling, scheduler::Submission;
  py::class_<Submission> submission(m, "Submission", "the parameters of a request");
  def_fields(
      submission,
      required_object("prompt",
                      [](Submission& s, const py::object& tokens) { s.prompt = token_list("prompt", tokens); }),
      required("max_new_tokens", &Submission::max_new_tokens),
      optional_object(
          "stop_tokens", py::tuple(),
          [](Submission& s, const py::object& tokens) { s.stop_tokens = token_list("stop_tokens", tokens); }),
      optional("temperature", &Submission::sampling, &Sampling::temperature),
      optional("top_k", &Submission::sampling, &Sampling::top_k),
      optional("top_p", &Submission::sampling, &Sampling::top_p),
      optional("min_p", &Submission::sampling, &Sampling::min_p),
      optional("seed", &Submission::sampling, &Sampling::seed), optional("streams", &Submission::streams),
      optional("min_new_tokens", &Submission::min_new_tokens), optional("num_logprobs", &Submission::num_logprobs),
      optional("ngram_group", &Submission::ngram_group), optional("max_nodes", &Submission::max_nodes),
      optional_object("extra", py::none(), [](Submission& s, const py::object& extra) { s.extra = held(extra); }),
      optional("constrained", &Submission::constrained), optional("migrated", &Submission::migrated),
      optional("cacheable", &Submission::cacheable), optional("shares_prefix", &Submission::shares_prefix),
      optional("priority", &Submission::priority), optional("timeout_ns", &Submission::timeout_ns),
      optional("client", &Submission::client));
  py::class_<PyAdmittedRequest> admitted(m, "AdmittedRequest", "a request that gets a slot");
  def_fields(admitted, required("id", &PyAdmittedRequest::id), required("tokens", &PyAdmittedRequest::tokens),
             optional("ngram_group", &PyAdmittedRequest::ngram_group), optional("extra", &PyAdmittedRequest::extra),
             optional("cached_entries", &PyAdmittedRequest::cached_entries),
             optional("snapshot", &PyAdmittedRequest::snapshot));
  py::class_<PyChunk> chunk(m, "PrefillChunk", "rows of a prompt for one prefill pass");
  def_fields(chunk, required("slot", &PyChunk::slot), required("start", &PyChunk::start),
             required("tokens", &PyChunk::tokens));
  py::class_<PyConstrained> constrained(m, "ConstrainedRow", "a constrained request of a round");
  def_fields(constrained, required("row", &PyConstrained::row), required("slot", &PyConstrained::slot),
             required("tokens", &PyConstrained::tokens));
  using Release = py::call_guard<WithoutGil>;
  const UpdateType update_type(
      m, "specdec_kernels._C.RequestUpdate", "New tokens of a request, or its end",
      {"request_id", "tokens", "reason", "rounds", "drafted", "accepted", "cached", "status", "scores", "error"});
  const TimesType times_type(m, "specdec_kernels._C.SchedulerTimes", "Counts, and totals in nanoseconds",
                             {"rounds", "rows", "host", "wait", "prefill", "device", "following", "gaps"});
  py::class_<PyScheduler>(m, "Scheduler", py::custom_type_setup(collect_executor))
      .def(py::init(&make_scheduler), "executor"_a, "config"_a, py::kw_only(), "commands"_a, "results"_a,
           "stream"_a = py::none(), "graphs"_a = py::dict(), "trace"_a = false, "channel"_a = py::none())
      .def("submit", &PyScheduler::submit, "submission"_a)
      .def(
          "submit_many",
          [](PyScheduler& s, const std::vector<Submission>& submissions) { return s.submit_many(submissions); },
          "submissions"_a)
      .def("cancel", &PyScheduler::cancel)
      .def("measure_rounds", &PyScheduler::measure_rounds, "batches"_a, Release())
      .def("set_costs", &PyScheduler::set_costs, "costs"_a)
      .def("run", &PyScheduler::run, Release())
      .def("step", &PyScheduler::step, Release())
      .def("settle", &PyScheduler::settle, Release())
      .def("clear_cache", &PyScheduler::clear_cache, Release())
      .def("stop", &PyScheduler::stop, Release())
      .def("pause", &PyScheduler::pause, "restart"_a = false, "request_id"_a = -1, Release())
      .def("resume", &PyScheduler::resume)
      .def("held",
           [](const PyScheduler& s, int64_t request_id) -> py::object {
             const auto held = s.held(request_id);
             return held ? py::object(py::make_tuple(held->slot, held->text)) : py::none();
           })
      .def(
          "set_graphs",
          [](PyScheduler& s, const std::map<RoundGraphs::Size, std::vector<intptr_t>>& graphs) {
            s.set_graphs(graphs);
            s.reset_rounds();
          },
          "graphs"_a)
      .def(
          "take", [update_type](PyScheduler& s, bool wait) { return take(update_type, s, wait); }, "wait"_a = true)
      .def_property_readonly("num_running", &PyScheduler::num_running)
      .def_property_readonly("num_waiting", &PyScheduler::num_waiting)
      .def_property_readonly("num_free_pages_estimate", &PyScheduler::num_free_pages_estimate)
      .def_property_readonly("num_retractions", &PyScheduler::num_retractions)
      .def_property_readonly("num_cached_pages", &PyScheduler::num_cached_pages)
      .def_property_readonly("num_shared_pages", &PyScheduler::num_shared_pages)
      .def_property_readonly("num_prefix_hits", &PyScheduler::num_prefix_hits)
      .def_property_readonly("num_cached_tokens", &PyScheduler::num_cached_tokens)
      .def_property_readonly("num_snapshots", &PyScheduler::num_snapshots)
      .def_property_readonly("num_saved_snapshots", &PyScheduler::num_saved_snapshots)
      .def_property_readonly("num_evicted_snapshots", &PyScheduler::num_evicted_snapshots)
      .def_property_readonly("num_restored_snapshots", &PyScheduler::num_restored_snapshots)
      .def_property_readonly("times",
                             [times_type](const PyScheduler& s) {
                               const auto t = s.recorder().totals();
                               return times_type(t.rounds, t.requests, t.host, t.wait, t.prefill, t.device, t.following,
                                                 t.gaps);
                             })
      .def_property_readonly("rounds_by_rows", [](const PyScheduler& s) { return s.recorder().rounds_by_rows(); })
      .def_property_readonly("costs", [](const PyScheduler& s) { return s.budget().costs(); })
      .def("write_trace", [](const PyScheduler& s, const std::string& path) { s.recorder().write_trace(path); });
}

}  // namespace specdec::python
