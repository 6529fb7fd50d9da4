// Functions that add the other files' bindings to the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace specdec::python {

void add_attention_plans(pybind11::module_& m);
void add_ngram_index(pybind11::module_& m);
void add_scheduler(pybind11::module_& m);

}  // namespace specdec::python
