#include "machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fiber.h"

Machine machine;

void fail(const char* format, ...) {
  Launch* launch = machine.launch;
  machine.stopped = true;
  if (launch->error[0]) {
    return;
  }
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(launch->error, sizeof launch->error, format, arguments);
  va_end(arguments);
}

void leave() {
  machine.stopped = true;
  void* abandoned;
  fiber_switch(&abandoned, machine.scheduler);
  __builtin_unreachable();
}

void report(FindingKind kind, u64 code, u64 other_code, const char* format, ...) {
  Launch* launch = machine.launch;
  const u64 at = code ? code - machine.code_base : 0, other_at = other_code ? other_code - machine.code_base : 0;
  for (u32 i = 0; i < launch->finding_count; ++i) {
    Finding& seen = launch->findings[i];
    if (at && seen.kind == kind && seen.code == at && seen.other_code == other_at) {
      seen.times++;
      return;
    }
  }
  if (launch->finding_count == launch->finding_room) {
    return;
  }
  Finding& finding = launch->findings[launch->finding_count++];
  finding.kind = kind;
  finding.times = 1;
  finding.code = at;
  finding.other_code = other_at;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(finding.text, sizeof finding.text, format, arguments);
  va_end(arguments);
}

Place::Place() {
  const ThreadContext& t = machine.current->thread;
  snprintf(text, sizeof text, "threadgroup (%u,%u,%u) thread (%u,%u,%u)", t.threadgroup_position[0],
           t.threadgroup_position[1], t.threadgroup_position[2], t.position_in_threadgroup[0],
           t.position_in_threadgroup[1], t.position_in_threadgroup[2]);
}

CodeMark::CodeMark(u64 return_address) {
  snprintf(text, sizeof text, "{code:%llx}", (unsigned long long)(return_address - 1 - machine.code_base));
}
