#include "python/fast_op.h"

#include <sstream>
#include <stdexcept>

namespace specdec::python {

OpNames op_names(const char* op, const char* arguments, const char* doc, const std::vector<const char*>& types,
                 const char* result) {
  OpNames names{.op = op, .doc = std::string(op) + "(", .arguments = {}};
  std::istringstream words(arguments);
  for (std::string name; words >> name;) names.arguments.push_back(name);
  if (names.arguments.size() != types.size())
    throw std::logic_error(std::string("def_op: ") + op + " has " + std::to_string(types.size()) + " parameters and " +
                           std::to_string(names.arguments.size()) + " names");
  for (size_t i = 0; i < types.size(); ++i) names.doc += (i ? ", " : "") + names.arguments[i] + ": " + types[i];
  names.doc += std::string(") -> ") + result + "\n\n" + doc;
  return names;
}

}  // namespace specdec::python
