// What a warp that leaves on abort says of what it waited for.
#pragma once
#include "machine.cuh"

// Called by one thread. What finds no room is counted all the same.
WINDLASS_DEVICE void report_entry(uint64_t address, uint32_t rank, const WindlassP2pReportEntry& entry) {
  WindlassP2pReport* const report = reinterpret_cast<WindlassP2pReport*>(address);
  if (!report) return;
  const uint32_t index = claim(&report->claimed);
  if (index >= WINDLASS_REPORT_ENTRIES) return;
  if (index == 0) report->rank = rank;
  report->entries[index] = entry;
}
