// Functions that add the bindings of each room to the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace specdec::python {

void add_draft(pybind11::module_& m);
void add_tree(pybind11::module_& m);
void add_layers(pybind11::module_& m);
void add_attention(pybind11::module_& m);
void add_mla(pybind11::module_& m);
void add_verify(pybind11::module_& m);
void add_kv(pybind11::module_& m);
void add_recurrent(pybind11::module_& m);
void add_round(pybind11::module_& m);
void add_compat(pybind11::module_& m);
void add_parallel(pybind11::module_& m);
void add_ngram_index(pybind11::module_& m);
void add_scheduler(pybind11::module_& m);
void add_replay(pybind11::module_& m);

}  // namespace specdec::python
