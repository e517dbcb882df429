# The C programs and how each is run.
add_library(harness STATIC support/harness.c support/reference.c support/collective.c support/one_thread.c
            support/messages.c support/values.c support/calls.c support/team.c support/held.c support/memory.c support/gathers.c
            support/uneven.c support/fused.c support/windows.c support/tuning.c)
target_include_directories(harness PUBLIC "${NCCL_INCLUDE_DIR}")
target_include_directories(harness SYSTEM PUBLIC "${STUBS}/include")
find_package(Threads REQUIRED)
target_link_libraries(harness PUBLIC nccl_link_stub cuda_link_stub Threads::Threads ${CMAKE_DL_LIBS} m)

set(RUN "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/run.py")
set(RUNS "${CMAKE_CURRENT_BINARY_DIR}/runs")

# A tuning table of GPUs of these kinds by which all sizes are fast, whatever the ranks: so every kernel runs.
function(write_tuning path)
  set(table "windlass-tuning 1\n# not measured\n")
  foreach(ranks RANGE 2 8)
    foreach(collective all_reduce broadcast reduce all_gather reduce_scatter uneven_all_gather uneven_reduce_scatter)
      foreach(kind IN LISTS ARGN)
        foreach(multicast no yes)
          string(APPEND table "${collective} ranks ${ranks} gpu ${kind} multicast ${multicast} fast_bytes_max 256M\n")
        endforeach()
      endforeach()
    endforeach()
  endforeach()
  file(WRITE "${path}" "${table}")
endfunction()

# One run of a program: on SIDE plain or windlass, on MACHINE sim or gpu.
function(add_run program machine side seconds)
  set(name "${machine}.${program}.${side}")
  set(options --out "${RUNS}/${name}")
  if(machine STREQUAL "sim")
    list(APPEND options --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}")
  else()
    list(APPEND options --nccl "${REAL_NCCL_LIBRARY}" --gpu)
  endif()
  if(side STREQUAL "windlass")
    list(APPEND options --windlass "${WINDLASS_LIBRARY_DIR}")
    if(program MATCHES "^pool")
      list(APPEND options --set WINDLASS_POOL=2048M)
    endif()
  endif()
  add_test(NAME ${name} COMMAND ${RUN} ${options} -- $<TARGET_FILE:${program}> ${ARGN})
  set_tests_properties(${name} PROPERTIES LABELS ${machine} TIMEOUT ${seconds} SKIP_RETURN_CODE 77)
  if(machine STREQUAL "gpu")
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  else()
    set_tests_properties(${name} PROPERTIES PROCESSORS 2)
  endif()
endfunction()

# A run of PROGRAM on MACHINE whose communicators' ranks meet, called KIND, with what reports must SAY of them and further
# options for the runner; its output must be that of the plain run.
function(add_meeting program machine kind seconds says)
  set(name "${machine}.${program}.${kind}")
  set(options --out "${RUNS}/${name}" --windlass "${WINDLASS_LIBRARY_DIR}" ${ARGN})
  if(machine STREQUAL "sim")
    list(APPEND options --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}")
  else()
    list(APPEND options --nccl "${REAL_NCCL_LIBRARY}" --gpu)
  endif()
  # Reasons have semicolons between them: no part of a list.
  add_test(NAME ${name} COMMAND ${RUN} ${options} --fabric "${says}" -- $<TARGET_FILE:${program}>)
  set_tests_properties(${name} PROPERTIES LABELS ${machine} TIMEOUT ${seconds} SKIP_RETURN_CODE 77
                       FIXTURES_SETUP ${machine}.${program}.${kind})
  if(machine STREQUAL "gpu")
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  else()
    set_tests_properties(${name} PROPERTIES PROCESSORS 2)
  endif()
  set(equal "${name}_equal")
  add_test(NAME ${equal} COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/same_output.py"
           "${RUNS}/${machine}.${program}.plain" "${RUNS}/${name}")
  set_tests_properties(${equal} PROPERTIES FIXTURES_REQUIRED "${machine}.${program};${machine}.${program}.${kind}"
                       LABELS ${machine} TIMEOUT 20)
endfunction()

# Programs that run a third time, where every communicator is a promise that can be one.
set(LAZY context_reset collectives sendrecv groups group_order threads premulsum registration graphs graphs_mixed splits births lifecycle random_calls random_collectives patterns pairs
         promises promise_errors promise_children forked id_then_fork exit_handlers)

# Where ranks meet on MACHINE, with promises as they are without a wish and, for those programs, with all of them.
function(add_fabric_on machine program seconds says)
  add_meeting(${program} ${machine} fabric ${seconds} "${says}" ${ARGN})
  if(program IN_LIST LAZY)
    set(options ${ARGN} --promised --set WINDLASS_LAZY=all)
    add_meeting(${program} ${machine} lazy ${seconds} "${says}" ${options})
  endif()
endfunction()

# On both machines, where there are any.
function(add_fabric program seconds says)
  if(SIM_DIR)
    add_fabric_on(sim ${program} ${seconds} "${says}" ${ARGN})
  endif()
  if(REAL_NCCL_LIBRARY)
    add_fabric_on(gpu ${program} ${seconds} "${says}" ${ARGN})
  endif()
endfunction()

# Both runs, and that they printed the same.
function(add_differential program machine seconds)
  add_run(${program} ${machine} plain ${seconds} ${ARGN})
  if(NOT WINDLASS_LIBRARY_DIR)
    return()
  endif()
  add_run(${program} ${machine} windlass ${seconds} ${ARGN})
  set(equal "${machine}.${program}.equal")
  add_test(NAME ${equal} COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/same_output.py"
           "${RUNS}/${machine}.${program}.plain" "${RUNS}/${machine}.${program}.windlass")
  set_tests_properties(${machine}.${program}.plain ${machine}.${program}.windlass
                       PROPERTIES FIXTURES_SETUP ${machine}.${program})
  set_tests_properties(${equal} PROPERTIES FIXTURES_REQUIRED ${machine}.${program} LABELS ${machine} TIMEOUT 20)
endfunction()

set(PROGRAMS strings arguments collectives sendrecv groups group_order lifecycle threads nonblocking premulsum registration graphs graphs_mixed
             conditional_graphs context_reset forked id_then_fork strangers exit_handlers random_calls random_collectives births patterns pairs absorbed graphs_p2p random_p2p splits promises promise_errors
             promise_children many_pairs many_communicators reuse parking uneven batches registered registered_lives
             registered_groups registered_alone registered_beside pool pool_growth windows windows_repair windows_ends window_patterns)
# Sends and receives of one fabric: on mailboxes, too.
set(MESSAGING sendrecv patterns pairs absorbed graphs_p2p random_p2p)
# About promises.
set(PROMISING promises promise_errors promise_children many_pairs reuse)
# Large all-gathers, whose buffers may be registered.
set(REGISTERING registered registered_lives registered_groups registered_alone registered_beside)
foreach(program IN LISTS PROGRAMS)
  add_executable(${program} programs/${program}.c)
  target_link_libraries(${program} PRIVATE harness)
  set(seconds 120)
  if(program STREQUAL "collectives" OR program STREQUAL "uneven" OR program STREQUAL "batches" OR program IN_LIST MESSAGING OR program IN_LIST PROMISING OR program STREQUAL "many_communicators" OR program IN_LIST REGISTERING OR program MATCHES "^window")
    set(seconds 300)
  endif()
  if(SIM_DIR)
    add_differential(${program} sim ${seconds})
  endif()
  if(REAL_NCCL_LIBRARY AND NOT program STREQUAL "context_reset")
    add_differential(${program} gpu ${seconds})
  endif()
endforeach()

# Births at which ranks meet: programs whose communicators all come from one id, and some whose do not.
if(WINDLASS_LIBRARY_DIR)
  foreach(program sendrecv groups threads premulsum registration graphs forked id_then_fork strangers exit_handlers pool pool_growth)
    add_fabric(${program} 300 "yes")
  endforeach()
  if(SIM_DIR)
    add_meeting(forked sim told 120 "yes" --logged "had communicators: its own are on NCCL")
  endif()
  add_fabric(graphs_mixed 120 "yes" --served fast)
  add_fabric(conditional_graphs 120 "yes" --served fast)
  # On GPUs nobody resets a context.
  if(SIM_DIR)
    add_fabric_on(sim context_reset 120 "yes" --served fast)
  endif()
  # Groups of communicators, as NCCL ordered them before 2.26, too: plainly, and with ours among them.
  add_fabric(group_order 300 "yes" --served fast)
  if(SIM_DIR)
    set(former --set WINDLASS_SIM_NCCL_VERSION=22512)
    add_test(NAME sim.group_order.former_plain COMMAND ${RUN} --out "${RUNS}/sim.group_order.former_plain"
             --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" ${former} -- $<TARGET_FILE:group_order>)
    set_tests_properties(sim.group_order.former_plain PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
    add_meeting(group_order sim former 300 "yes" --served fast --set WINDLASS_LAZY=off ${former})
    add_meeting(group_order sim former_lazy 300 "yes" --served fast --promised --set WINDLASS_LAZY=all ${former})
  endif()
  # Two cores spin for 32 blocks a rank.
  add_fabric(collectives 1200 "yes" --served fast)
  # As above. Where limits were measured calls wait in their groups for others; elsewhere all end at the same small size. Two ranks: promises.
  if(SIM_DIR)
    set(measured --served fast --set WINDLASS_SIM_MULTIPROCESSORS=132)
    add_meeting(uneven sim fabric 600 "yes" --served fast)
    add_meeting(uneven sim measured 600 "yes" ${measured})
    add_meeting(uneven sim lazy 600 "yes" ${measured} --promised --set WINDLASS_LAZY=all)
  endif()
  if(REAL_NCCL_LIBRARY)
    add_fabric_on(gpu uneven 300 "yes" --served fast)
  endif()
  set(GROUPED "it was made in one group with others")
  # One rank of `births` goes to NCCL without the others.
  add_fabric(births 300 "yes;${GROUPED};a rank runs without Windlass or went to NCCL")
  # What is said only where there are two ranks.
  set(APART "it was made from another, and a rank of it is on another host, has no Windlass or declined")
  set(ORPHANS "it was grown, or made from a communicator on NCCL?")
  add_fabric(lifecycle 120 "yes;its init has several ids;it has one rank;${ORPHANS}")
  add_fabric(nonblocking 120 "its init does not wait for the other ranks")
  add_fabric(random_calls 120 "yes;it has one rank?")
  add_fabric(random_collectives 300 "yes" --served fast)
  if(SIM_DIR)
    # Where all sizes are fast, so that every wire is used; of many ranks, and of odd numbers. And on devices without clusters.
    write_tuning("${CMAKE_CURRENT_BINARY_DIR}/all.tuning" 9.0/32 8.0/32)
    # With RANKS ranks, called NAME; further options for the runner, then after -- words for the program.
    function(add_with_ranks program name ranks served)
      set(test "sim.${program}.${name}")
      add_test(NAME ${test} COMMAND ${RUN} --out "${RUNS}/${test}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
               --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --served ${served} --set CTESTS_RANKS=${ranks}
               --set "WINDLASS_TUNING=${CMAKE_CURRENT_BINARY_DIR}/all.tuning" ${ARGN})
      set_tests_properties(${test} PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
    endfunction()
    foreach(ranks 3 5 8)
      add_with_ranks(random_collectives fast_of_${ranks} ${ranks} fast --set CTESTS_OPERATIONS=200 -- $<TARGET_FILE:random_collectives> processes)
    endforeach()
    add_meeting(graphs sim measured 300 "yes" --served fast --set WINDLASS_SIM_MULTIPROCESSORS=132)
    add_meeting(graphs sim unmixed 120 "yes" --set NCCL_GRAPH_MIXING_SUPPORT=0)
    set(without --set WINDLASS_SIM_CAPABILITY=80)
    add_with_ranks(random_collectives without_clusters 4 fast ${without} --set CTESTS_OPERATIONS=200 -- $<TARGET_FILE:random_collectives> processes)
    add_with_ranks(patterns without_clusters 4 mailbox ${without} -- $<TARGET_FILE:patterns>)
  endif()
  add_fabric(batches 300 "yes" --served fast)
  if(SIM_DIR)
    # Off on all ranks, or on one: then more than two collectives of a group are NCCL's. Of all sizes, of few ranks and of many.
    function(add_batches name setting)
      add_test(NAME sim.batches.${name} COMMAND ${RUN} --out "${RUNS}/sim.batches.${name}" --nccl "${SIM_DIR}/libnccl.so.2"
               --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --served fast --set ${setting}
               -- $<TARGET_FILE:batches> processes many full larger opposite_orders captured ${ARGN})
      set_tests_properties(sim.batches.${name} PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
    endfunction()
    add_batches(off WINDLASS_BATCH=off)
    add_batches(small WINDLASS_BATCH=small tuned largest)
    add_batches(alone WINDLASS_BATCH=all alone)
    foreach(ranks 2 4 8)
      add_batches(all_of_${ranks} CTESTS_RANKS=${ranks} tuned largest any among_others)
    endforeach()
  endif()
  add_fabric(splits 300 "yes;it has one rank;its init does not wait for the other ranks;${GROUPED};${APART};${ORPHANS}")
  # Programs about when NCCL builds what it promised: fast collectives never have it built.
  set(SLOW --set WINDLASS_COLLECTIVES=off)
  add_fabric(promises 300 "yes" --promised ${SLOW})
  if(SIM_DIR)
    add_meeting(promises sim warm 300 "yes" ${SLOW})
    add_meeting(promises sim fast 300 "yes" --served fast)
  endif()
  if(REAL_NCCL_LIBRARY)
    add_meeting(promises gpu warm 300 "yes" ${SLOW})
    add_meeting(promises gpu fast 300 "yes" --served fast)
  endif()
  add_fabric(promise_errors 300 "yes" --promised ${SLOW})
  if(SIM_DIR)
    add_meeting(promise_errors sim fast 300 "yes" --served fast)
  endif()
  add_fabric(promise_children 300 "yes;it has one rank;${GROUPED}" --promised ${SLOW})
  # What is parked on a GPU is of many sizes, up to its limit.
  if(SIM_DIR)
    add_fabric_on(sim reuse 300 "yes" ${SLOW})
  endif()
  if(REAL_NCCL_LIBRARY)
    add_fabric_on(gpu reuse 300 "yes" --set WINDLASS_CACHE_MAX=0 ${SLOW})
  endif()
  add_fabric(many_pairs 300 "yes" --promised ${SLOW})
  # None is left to NCCL: of each communicator and rank two calls are collectives. Windlass clears what it takes, and so the host has it all:
  # of many ranks there are fewer communicators, on devices with less room for them.
  add_fabric(many_communicators 300 "yes" --just fast=256 --set WINDLASS_SIM_DEVICE_MEMORY=4096)
  if(SIM_DIR)
    function(add_communicators count ranks)
      math(EXPR collectives "2 * ${count} * ${ranks}")
      set(name "sim.many_communicators.${count}_of_${ranks}")
      add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
               --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --just fast=${collectives} --set CTESTS_RANKS=${ranks}
               --set WINDLASS_SIM_DEVICE_MEMORY=2048 -- $<TARGET_FILE:many_communicators> ${count})
      set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
    endfunction()
    add_communicators(20 3)
    add_communicators(6 8)
  endif()
endif()

# Recycled memory with other limits: few megabytes, none at all; and where NCCL has its memory from cudaMalloc.
if(WINDLASS_LIBRARY_DIR)
  foreach(limit 24M off)
    if(SIM_DIR)
      add_meeting(pool sim pool_${limit} 120 "yes" --set WINDLASS_POOL=${limit})
    endif()
    if(REAL_NCCL_LIBRARY)
      add_meeting(pool gpu pool_${limit} 120 "yes" --set WINDLASS_POOL=${limit})
    endif()
  endforeach()
endif()

# Large all-gathers where ranks meet; and of eight ranks, each with a second thread. On GPUs many would be fast.
if(WINDLASS_LIBRARY_DIR)
  foreach(program IN LISTS REGISTERING)
    add_fabric(${program} 300 "yes" --served registered --set WINDLASS_REGISTER=on --set WINDLASS_COLLECTIVES=off)
  endforeach()
  if(SIM_DIR)
    add_test(NAME sim.registered_lives.eight COMMAND ${RUN} --out "${RUNS}/sim.registered_lives.eight"
             --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes
             --served registered --set WINDLASS_REGISTER=on --set CTESTS_RANKS=8
             -- $<TARGET_FILE:registered_lives> threads)
    set_tests_properties(sim.registered_lives.eight PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
    # One rank of four that will not: of its peers' calls only the first few are registered, or none.
    foreach(part own without)
      set(name "sim.registered_alone.${part}")
      if(part STREQUAL "own")
        set(limits --served registered --most registered=20)
        set(words processes own)
      else()
        set(limits --most registered=0)
        set(words without)
      endif()
      add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
               --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes ${limits} --set WINDLASS_REGISTER=on --set CTESTS_RANKS=4
               -- $<TARGET_FILE:registered_alone> ${words})
      set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
    endforeach()
    # Where it takes long to give registrations back, in the middle of which communicators end.
    add_test(NAME sim.registered_beside.aborts COMMAND ${RUN} --out "${RUNS}/sim.registered_beside.aborts"
             --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes
             --served registered --set WINDLASS_REGISTER=on --set WINDLASS_SIM_DEREGISTER_MS=200
             -- $<TARGET_FILE:registered_beside> aborts)
    set_tests_properties(sim.registered_beside.aborts PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
  endif()
endif()

# Windows that are kept. Fast collectives look at no window.
if(WINDLASS_LIBRARY_DIR)
  set(keeping --set WINDLASS_WINDOWS=keep --set WINDLASS_POOL=2048M --set WINDLASS_COLLECTIVES=off)
  foreach(program windows windows_repair windows_ends window_patterns registration registered_lives)
    if(SIM_DIR)
      add_meeting(${program} sim keeping 300 "yes" ${keeping})
      add_meeting(${program} sim keeping_lazy 300 "yes" ${keeping} --promised --set WINDLASS_LAZY=all)
    endif()
    if(REAL_NCCL_LIBRARY)
      add_meeting(${program} gpu keeping 300 "yes" ${keeping})
    endif()
  endforeach()
  # What NCCL alone would hang on.
  add_executable(windows_refused programs/windows_refused.c)
  target_link_libraries(windows_refused PRIVATE harness)
  if(SIM_DIR)
    add_test(NAME sim.windows.thousand COMMAND ${RUN} --out "${RUNS}/sim.windows.thousand" --nccl "${SIM_DIR}/libnccl.so.2"
             --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes ${keeping} -- $<TARGET_FILE:windows> thousand)
    set_tests_properties(sim.windows.thousand PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
    add_test(NAME sim.windows_ends.faults COMMAND ${RUN} --out "${RUNS}/sim.windows_ends.faults" --nccl "${SIM_DIR}/libnccl.so.2"
             --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes ${keeping} --set WINDLASS_HANG_TIMEOUT=1
             -- $<TARGET_FILE:windows_ends> faults)
    set_tests_properties(sim.windows_ends.faults PROPERTIES LABELS sim TIMEOUT 60 PROCESSORS 2)
    # Little is kept: blocks leave while their windows stand.
    foreach(program windows_ends window_patterns)
      add_meeting(${program} sim little 300 "yes" --set WINDLASS_WINDOWS=keep --set WINDLASS_POOL=16M --set WINDLASS_COLLECTIVES=off)
    endforeach()
    # Pairs that NCCL builds at once, whose windows the stand-in counts.
    add_meeting(window_patterns sim keeping_now 300 "yes" ${keeping} --set WINDLASS_LAZY=off)
    foreach(section processes threads)
      set(name "sim.windows_refused.${section}")
      add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
               --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes ${keeping} --set WINDLASS_HANG_TIMEOUT=2 --set WINDLASS_LOG=warn --set WINDLASS_LOG_FILE=${RUNS}/${name}/log.txt
               -- $<TARGET_FILE:windows_refused> ${section})
      set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
    endforeach()
  endif()
endif()

# Calls that ranks compare. The stand-in lets unequal offsets pass here: what is asked for is the line that names the rank.
add_executable(checked programs/checked.c)
target_link_libraries(checked PRIVATE harness)
if(WINDLASS_LIBRARY_DIR)
  foreach(section processes threads in_turn)
    foreach(machine sim gpu)
      set(name "${machine}.checked.${section}")
      set(checking --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --set WINDLASS_CHECK=1 --set WINDLASS_WINDOWS=keep --set WINDLASS_POOL=2048M
          --set WINDLASS_SIM_STRICT=0 --set WINDLASS_LOG_FILE=${RUNS}/${name}/log.txt -- $<TARGET_FILE:checked> ${section})
      if(machine STREQUAL "sim" AND SIM_DIR)
        add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" ${checking})
        set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
      elseif(machine STREQUAL "gpu" AND REAL_NCCL_LIBRARY)
        add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${REAL_NCCL_LIBRARY}" --gpu ${checking})
        set_tests_properties(${name} PROPERTIES LABELS gpu TIMEOUT 300 RUN_SERIAL ON)
      endif()
    endforeach()
  endforeach()
endif()

# Tuning tables, of two ranks and two communicators: five all-reduces or eight all-gathers of each are fast.
add_executable(tuned programs/tuned.c)
target_link_libraries(tuned PRIVATE harness)
if(WINDLASS_LIBRARY_DIR)
  foreach(part same other none wrong)
    set(tuning --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --set CTESTS_RANKS=2)
    if(part STREQUAL "same")
      list(APPEND tuning --just fast=20)
    else()
      list(APPEND tuning --just fast=32)
    endif()
    if(SIM_DIR)
      add_test(NAME sim.tuned.${part} COMMAND ${RUN} --out "${RUNS}/sim.tuned.${part}" --nccl "${SIM_DIR}/libnccl.so.2"
               --cuda "${SIM_DIR}" ${tuning} -- $<TARGET_FILE:tuned> ${part})
      set_tests_properties(sim.tuned.${part} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
    endif()
    # What the built-in table says of a GPU may be more than of the stand-in.
    if(REAL_NCCL_LIBRARY AND part STREQUAL "same")
      add_test(NAME gpu.tuned.${part} COMMAND ${RUN} --out "${RUNS}/gpu.tuned.${part}" --nccl "${REAL_NCCL_LIBRARY}" --gpu
               ${tuning} -- $<TARGET_FILE:tuned> ${part})
      set_tests_properties(gpu.tuned.${part} PROPERTIES LABELS gpu TIMEOUT 120 RUN_SERIAL ON)
    endif()
  endforeach()
endif()

# Grids of kernels, by the simulator's account: on devices of so many multiprocessors, what the largest has.
add_executable(grids programs/grids.c)
target_link_libraries(grids PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  write_tuning("${CMAKE_CURRENT_BINARY_DIR}/grids.tuning" 9.0/132 9.0/108 9.0/78)
  function(add_grids part ranks multiprocessors largest)
    set(name "sim.grids.${part}_of_${ranks}_on_${multiprocessors}")
    add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
             --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --served fast --set CTESTS_RANKS=${ranks}
             --set "WINDLASS_TUNING=${CMAKE_CURRENT_BINARY_DIR}/grids.tuning" --set WINDLASS_SIM_DEVICE_MEMORY=6144
             --set WINDLASS_SIM_MULTIPROCESSORS=${multiprocessors} -- $<TARGET_FILE:grids> ${part} ${largest})
    set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
  endfunction()
  add_grids(alike 2 132 32)
  add_grids(alike 2 108 24)
  add_grids(alike 2 78 16)
  add_grids(unlike 3 132 32)
  add_grids(unlike 3 78 16)
endif()

# Room in the symmetric heap for three communicators of 4 ranks: two at a time, and one of before that peers have not closed yet.
add_executable(successors programs/successors.c)
target_link_libraries(successors PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  foreach(section processes threads)
    set(name "sim.successors.${section}")
    add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
             --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --served mailbox --set WINDLASS_HEAP_MAX=168M
             -- $<TARGET_FILE:successors> ${section})
    set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
  endforeach()
endif()

# What goes wrong on one rank alone, by the stand-in's means.
add_executable(registered_faults programs/registered_faults.c)
target_link_libraries(registered_faults PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  foreach(part all disabled few)
    set(name "sim.registered_faults.${part}")
    set(limits --served registered)
    set(words ${part})
    if(part STREQUAL "all")
      set(words "")
    elseif(part STREQUAL "disabled")
      list(APPEND limits --set WINDLASS_SIM_STRICT=0)
    else()
      set(limits --most registered=0)
    endif()
    add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
             --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes ${limits} --set WINDLASS_REGISTER=on --set WINDLASS_COLLECTIVES=off
             -- $<TARGET_FILE:registered_faults> ${words})
    set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
  endforeach()
endif()

# A first collective beside a receive that waits, each as the first thing of its process: NCCL's first launches wait for all that
# runs on the device.
if(WINDLASS_LIBRARY_DIR)
  foreach(lazy pairs off legacy)
    set(set WINDLASS_LAZY=${lazy})
    if(lazy STREQUAL "legacy")
      # NCCL allocates by cudaMalloc and shares by legacy IPC.
      set(set NCCL_CUMEM_ENABLE=0)
    endif()
    set(beside --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --set WINDLASS_COLLECTIVES=off --set ${set} -- $<TARGET_FILE:promises> processes first_beside_a_wait)
    if(SIM_DIR)
      add_test(NAME sim.promises.beside_${lazy} COMMAND ${RUN} --out "${RUNS}/sim.promises.beside_${lazy}" --nccl "${SIM_DIR}/libnccl.so.2"
               --cuda "${SIM_DIR}" ${beside})
      set_tests_properties(sim.promises.beside_${lazy} PROPERTIES LABELS sim TIMEOUT 60 PROCESSORS 2)
    endif()
    if(REAL_NCCL_LIBRARY)
      add_test(NAME gpu.promises.beside_${lazy} COMMAND ${RUN} --out "${RUNS}/gpu.promises.beside_${lazy}" --nccl "${REAL_NCCL_LIBRARY}"
               --gpu ${beside})
      set_tests_properties(gpu.promises.beside_${lazy} PROPERTIES LABELS gpu TIMEOUT 60 RUN_SERIAL ON)
    endif()
  endforeach()
endif()

# Ids that NCCL never used: plain runs would keep a thread and a socket of each.
# NCCL's variables: those that programs set, and when they are read. A late one holds for what is made after it.
add_executable(environment programs/environment.c)
target_link_libraries(environment PRIVATE harness)
function(add_late machine name says)
  set(name "${machine}.environment.${name}")
  set(options --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}")
  if(machine STREQUAL "gpu")
    set(options --nccl "${REAL_NCCL_LIBRARY}" --gpu)
  endif()
  add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" ${options} --windlass "${WINDLASS_LIBRARY_DIR}" --fabric "${says}" ${ARGN}
           -- $<TARGET_FILE:environment>)
  set_tests_properties(${name} PROPERTIES LABELS ${machine} TIMEOUT 120 PROCESSORS 2 SKIP_RETURN_CODE 77)
  if(machine STREQUAL "gpu")
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  endif()
endfunction()
if(WINDLASS_LIBRARY_DIR)
  set(no_peers "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL forbids peer access")
  foreach(machine sim gpu)
    if((machine STREQUAL "sim" AND SIM_DIR) OR (machine STREQUAL "gpu" AND REAL_NCCL_LIBRARY))
      add_late(${machine} late_p2p "${no_peers}" --set CTESTS_LATE=NCCL_P2P_DISABLE=1 --logged "NCCL_P2P_DISABLE=1: peer groups are off")
      add_late(${machine} late_legacy "yes" --set CTESTS_LATE=NCCL_CUMEM_ENABLE=0 --served mailbox
               --logged "NCCL_CUMEM_ENABLE=0: the memory pool, kept windows and registration are off")
      # The second communicator of all ranks alone, and that of two.
      if(machine STREQUAL "sim")
        # What NCCL built before is tuned otherwise: it serves nobody after. Where nothing changed it does.
        add_late(sim later_proto "yes" --set CTESTS_LATER=NCCL_PROTO=Simple --lazy built)
        add_late(sim cached "yes" --lazy built,reused)
      endif()
      add_late(${machine} later_algo "yes" --set CTESTS_LATER=NCCL_ALGO=Ring --served fast --logged "NCCL_ALGO=Ring: native collectives and kept windows are off")
      # Read once: a change comes too late.
      add_late(${machine} later_p2p "yes" --set CTESTS_LATER=NCCL_P2P_DISABLE=1 --served mailbox)
    endif()
  endforeach()
endif()
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_late(sim option "yes" --set CTESTS_LATE=WINDLASS_COLLECTIVES=off --most fast=0)
  add_late(sim env_plugin "NCCL may take variables from a plugin" --set NCCL_ENV_PLUGIN=mine)
  add_late(sim no_env_plugin "yes" --set NCCL_ENV_PLUGIN=none --set WINDLASS_SIM_NCCL_VERSION=23007)
  # NCCL_NO_CACHE: what is read once is read at every init, from 2.29.7 on.
  add_late(sim no_cache "yes;${no_peers}" --set NCCL_NO_CACHE=NCCL_P2P_DISABLE --set CTESTS_LATER=NCCL_P2P_DISABLE=1
           --set WINDLASS_SIM_NCCL_VERSION=22907)
  add_late(sim launch_mode "yes" --set NCCL_LAUNCH_MODE=group --served fast)
  # 2.18 allocates by cudaMalloc unless it is told otherwise.
  add_late(sim oldest "yes" --set WINDLASS_SIM_NCCL_VERSION=21806 --served fast)
  add_test(NAME sim.environments COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/environments.py"
           --out "${RUNS}/sim.environments" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}"
           $<TARGET_FILE:environment>)
  set_tests_properties(sim.environments PROPERTIES LABELS sim TIMEOUT 600 PROCESSORS 2)
endif()

add_executable(unused_ids programs/unused_ids.c)
target_link_libraries(unused_ids PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.unused_ids.fabric COMMAND ${RUN} --out "${RUNS}/sim.unused_ids.fabric" --nccl "${SIM_DIR}/libnccl.so.2"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes -- $<TARGET_FILE:unused_ids>)
  set_tests_properties(sim.unused_ids.fabric PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
endif()
if(REAL_NCCL_LIBRARY AND WINDLASS_LIBRARY_DIR)
  add_test(NAME gpu.unused_ids.fabric COMMAND ${RUN} --out "${RUNS}/gpu.unused_ids.fabric" --nccl "${REAL_NCCL_LIBRARY}"
           --gpu --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes -- $<TARGET_FILE:unused_ids>)
  set_tests_properties(gpu.unused_ids.fabric PROPERTIES LABELS gpu TIMEOUT 300 RUN_SERIAL ON)
endif()

# Communicators that are used again, or not: foretold to the last.
if(WINDLASS_LIBRARY_DIR)
  if(SIM_DIR)
    add_meeting(parking sim fabric 120 "yes;${GROUPED}" --promised --reused ${SLOW})
    add_meeting(parking sim unparked 120 "yes;${GROUPED}" --promised --reused ${SLOW} --set WINDLASS_CACHE_MAX=0)
    foreach(part differing cycles kept short)
      set(name "sim.parking.${part}")
      set(checks --fabric yes ${SLOW})
      if(NOT part STREQUAL "cycles")
        list(APPEND checks --reused)
      endif()
      add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
               --windlass "${WINDLASS_LIBRARY_DIR}" ${checks} -- $<TARGET_FILE:parking> ${part})
      set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
    endforeach()
  endif()
  if(REAL_NCCL_LIBRARY)
    # Each takes NCCL hundreds of MiB there.
    add_meeting(parking gpu fabric 120 "yes;${GROUPED}" --promised --reused ${SLOW} --set WINDLASS_CACHE_MAX=64G)
  endif()
endif()

if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  # Plain runs would wait for the dead. A communicator that fails in its meeting has neither fabric nor reason.
  set(births_says ";yes")
  set(splits_says "yes")
  set(promise_errors_says "yes")
  foreach(program births splits promise_errors)
    set(name "sim.${program}.faults")
    add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
             --windlass "${WINDLASS_LIBRARY_DIR}" --fabric "${${program}_says}" -- $<TARGET_FILE:${program}> faults)
    set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
  endforeach()
endif()

# What NCCL's files forbid holds for fabrics, too.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/nccl.conf" "# As an administrator writes it.\nNCCL_P2P_DISABLE=1\n")
  add_test(NAME sim.groups.nccl_conf COMMAND ${RUN} --out "${RUNS}/sim.groups.nccl_conf" --nccl "${SIM_DIR}/libnccl.so.2"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL forbids peer access"
           --set "NCCL_CONF_FILE=${CMAKE_CURRENT_BINARY_DIR}/nccl.conf" -- $<TARGET_FILE:groups>)
  set_tests_properties(sim.groups.nccl_conf PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()

# Where a world has no fabric, what is split of it has none either, and that is said once.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.splits.said COMMAND ${RUN} --out "${RUNS}/sim.splits.said" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
           --windlass "${WINDLASS_LIBRARY_DIR}" --fabric "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL forbids peer access;it was grown, or made from a communicator on NCCL"
           --logged "was made from one without a fabric, in a group" --set NCCL_P2P_DISABLE=1 -- $<TARGET_FILE:splits> processes)
  set_tests_properties(sim.splits.said PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()

# A world over two hosts has no fabric; what is split of it has, where all its ranks are on one and have Windlass.
set(derived "it was grown, or made from a communicator on NCCL")
set(says "yes;${APART};${derived}")
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  set(options --hosts --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" --set CTESTS_RANKS=6)
  set(windlass --windlass "${WINDLASS_LIBRARY_DIR}")
  add_test(NAME sim.splits.hosts_plain COMMAND ${RUN} --out "${RUNS}/sim.splits.hosts_plain" ${options} -- $<TARGET_FILE:splits>)
  add_test(NAME sim.splits.hosts COMMAND ${RUN} --out "${RUNS}/sim.splits.hosts" ${options} ${windlass} --served mailbox
           --fabric "ranks are on different hosts;${says}" -- $<TARGET_FILE:splits>)
  # Rank 2 is on the first host.
  add_test(NAME sim.splits.loner COMMAND ${RUN} --out "${RUNS}/sim.splits.loner" ${options} ${windlass} --served mailbox --set CTESTS_LONER=2
           --fabric "a rank runs without Windlass or went to NCCL?;ranks are on different hosts?;?;${says}" -- $<TARGET_FILE:splits>)
  # Of more ranks than a fabric has: on one host.
  add_test(NAME sim.splits.many COMMAND ${RUN} --out "${RUNS}/sim.splits.many" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" --set CTESTS_RANKS=18
           ${windlass} --served mailbox --fabric "yes;it has more than 16 ranks;${derived}" -- $<TARGET_FILE:splits>)
  set_tests_properties(sim.splits.many PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
  foreach(run hosts loner)
    add_test(NAME sim.splits.${run}_equal COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/same_output.py"
             "${RUNS}/sim.splits.hosts_plain" "${RUNS}/sim.splits.${run}")
    set_tests_properties(sim.splits.${run}_equal PROPERTIES FIXTURES_REQUIRED "sim.splits.hosts_plain;sim.splits.${run}" LABELS sim TIMEOUT 20)
  endforeach()
  foreach(run hosts_plain hosts loner)
    set_tests_properties(sim.splits.${run} PROPERTIES FIXTURES_SETUP sim.splits.${run} LABELS sim TIMEOUT 120 PROCESSORS 2 SKIP_RETURN_CODE 77)
  endforeach()
endif()

if(REAL_NCCL_LIBRARY AND WINDLASS_LIBRARY_DIR)
  set(options --hosts --gpu --nccl "${REAL_NCCL_LIBRARY}" --set CTESTS_RANKS=4)
  add_test(NAME gpu.splits.hosts_plain COMMAND ${RUN} --out "${RUNS}/gpu.splits.hosts_plain" ${options} -- $<TARGET_FILE:splits>)
  add_test(NAME gpu.splits.hosts COMMAND ${RUN} --out "${RUNS}/gpu.splits.hosts" ${options} --windlass "${WINDLASS_LIBRARY_DIR}" --served mailbox
           --fabric "ranks are on different hosts;it has one rank;${says}" -- $<TARGET_FILE:splits>)
  add_test(NAME gpu.splits.hosts_equal COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/same_output.py"
           "${RUNS}/gpu.splits.hosts_plain" "${RUNS}/gpu.splits.hosts")
  foreach(run hosts_plain hosts)
    set_tests_properties(gpu.splits.${run} PROPERTIES FIXTURES_SETUP gpu.splits.${run} LABELS gpu TIMEOUT 300 RUN_SERIAL ON SKIP_RETURN_CODE 77)
  endforeach()
  set_tests_properties(gpu.splits.hosts_equal PROPERTIES FIXTURES_REQUIRED "gpu.splits.hosts_plain;gpu.splits.hosts" LABELS gpu TIMEOUT 20)
endif()

# What NCCL is told to go by binds us.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  foreach(variable NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_CTA_POLICY=1)
    string(REGEX REPLACE "=.*" "" name "sim.batches.${variable}")
    add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
             --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --most fast=0 --set WINDLASS_BATCH=off --set ${variable} -- $<TARGET_FILE:batches> processes captured)
    set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
  endforeach()
endif()

# Where a rank's launches wait for others', a copy that orders NCCL's work before ours would, too. With NCCL_LAUNCH_MODE=GROUP those of
# one process do: the program's ranks are processes first, then threads.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  foreach(variable NCCL_LAUNCH_MODE=GROUP NCCL_LAUNCH_ORDER_IMPLICIT=1)
    string(REGEX REPLACE "=.*" "" name "sim.groups.${variable}")
    set(says "NCCL_LAUNCH_ORDER_IMPLICIT is set")
    if(variable MATCHES "MODE")
      set(says "yes;NCCL_LAUNCH_MODE=GROUP is set, and ranks share a process")
    endif()
    add_test(NAME ${name} COMMAND ${RUN} --out "${RUNS}/${name}" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
             --windlass "${WINDLASS_LIBRARY_DIR}" --fabric "${says}" --set ${variable} -- $<TARGET_FILE:groups>)
    set_tests_properties(${name} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
  endforeach()
endif()

# Without NVLink a line may arrive in parts: no fabric.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.groups.pcie COMMAND ${RUN} --out "${RUNS}/sim.groups.pcie" --nccl "${SIM_DIR}/libnccl.so.2"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric "a rank could not prepare"
           --set WINDLASS_SIM_NVLINK=0 -- $<TARGET_FILE:groups>)
  set_tests_properties(sim.groups.pcie PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()

# Processes that end while others go on.
add_executable(leavers programs/leavers.c)
target_link_libraries(leavers PRIVATE harness)
if(SIM_DIR)
  set(leaving --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}")
  add_test(NAME sim.leavers.plain COMMAND ${RUN} --out "${RUNS}/sim.leavers.plain" ${leaving} -- $<TARGET_FILE:leavers>)
  set_tests_properties(sim.leavers.plain PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
  if(WINDLASS_LIBRARY_DIR)
    foreach(lazy pairs all off)
      add_test(NAME sim.leavers.${lazy} COMMAND ${RUN} --out "${RUNS}/sim.leavers.${lazy}" ${leaving} --windlass "${WINDLASS_LIBRARY_DIR}"
               --fabric yes --set WINDLASS_SIM_STRICT=0 --set WINDLASS_LAZY=${lazy} -- $<TARGET_FILE:leavers>)
      set_tests_properties(sim.leavers.${lazy} PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
    endforeach()
  endif()
endif()

# Processes that lack descriptors, memory or threads: one call of Windlass's after the other fails.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  add_executable(scarce programs/scarce.c)
  target_link_libraries(scarce PRIVATE harness)
  add_library(lacking SHARED support/scarce.c)
  target_link_libraries(lacking PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  add_test(NAME sim.scarce COMMAND ${RUN} --out "${RUNS}/sim.scarce" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
           --windlass "${WINDLASS_LIBRARY_DIR}" --fabric "yes?" --set WINDLASS_SIM_STRICT=0
           --set LD_PRELOAD=$<TARGET_FILE:lacking> -- $<TARGET_FILE:scarce> all 4 9)
  set_tests_properties(sim.scarce PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2 SKIP_RETURN_CODE 77)
endif()

# Births that the stand-in loses by wish, plainly and where ranks meet.
add_executable(lost_births programs/lost_births.c)
target_link_libraries(lost_births PRIVATE harness)
if(SIM_DIR)
  set(losing --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" --set WINDLASS_SIM_LOST_BIRTHS=2,4,5,6)
  add_test(NAME sim.lost_births.plain COMMAND ${RUN} --out "${RUNS}/sim.lost_births.plain" ${losing}
           -- $<TARGET_FILE:lost_births>)
  set_tests_properties(sim.lost_births.plain PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
  if(WINDLASS_LIBRARY_DIR)
    add_test(NAME sim.lost_births.fabric COMMAND ${RUN} --out "${RUNS}/sim.lost_births.fabric" ${losing}
             --windlass "${WINDLASS_LIBRARY_DIR}" --fabric "yes;" --set WINDLASS_LAZY=off -- $<TARGET_FILE:lost_births>)
    set_tests_properties(sim.lost_births.fabric PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
  endif()
endif()

# Builds of promises that the stand-in loses on one rank by wish: plain runs would wait for it.
add_executable(lost_promises programs/lost_promises.c)
target_link_libraries(lost_promises PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.lost_promises.lazy COMMAND ${RUN} --out "${RUNS}/sim.lost_promises.lazy" --nccl "${SIM_DIR}/libnccl.so.2"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric "yes;it has one rank" --set WINDLASS_LAZY=all
           --set WINDLASS_FIRST_LAUNCH_GUARD=off --set WINDLASS_COLLECTIVES=off -- $<TARGET_FILE:lost_promises>)
  set_tests_properties(sim.lost_promises.lazy PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()

# Collectives that came with NCCL 2.31, which the stand-in is given.
add_executable(configured_calls programs/configured_calls.c)
target_link_libraries(configured_calls PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.configured_calls.fabric COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/newer_nccl.py"
           "${CMAKE_C_COMPILER}" "${NCCL_INCLUDE_DIR}:${STUBS}/include" "${SIM_DIR}/libnccl.so.2" "${RUNS}/sim.configured_calls.fabric"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --promised --set WINDLASS_COLLECTIVES=off -- $<TARGET_FILE:configured_calls>)
  set_tests_properties(sim.configured_calls.fabric PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()

# One-sided calls came with NCCL 2.29.2.
add_executable(one_sided programs/one_sided.c)
target_link_libraries(one_sided PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.one_sided.fabric COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/newer_nccl.py"
           "${CMAKE_C_COMPILER}" "${NCCL_INCLUDE_DIR}:${STUBS}/include" "${SIM_DIR}/libnccl.so.2" "${RUNS}/sim.one_sided.fabric"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --served fast -- $<TARGET_FILE:one_sided>)
  set_tests_properties(sim.one_sided.fabric PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()

# Plain runs would wait for the dead.
add_executable(faults programs/faults.c)
target_link_libraries(faults PRIVATE harness)
set(faulty --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --served mailbox --set WINDLASS_HANG_TIMEOUT=2)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.faults.mailbox COMMAND ${RUN} --out "${RUNS}/sim.faults.mailbox" --nccl "${SIM_DIR}/libnccl.so.2"
           --cuda "${SIM_DIR}" ${faulty} -- $<TARGET_FILE:faults>)
  set_tests_properties(sim.faults.mailbox PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()
if(REAL_NCCL_LIBRARY AND WINDLASS_LIBRARY_DIR)
  add_test(NAME gpu.faults.mailbox COMMAND ${RUN} --out "${RUNS}/gpu.faults.mailbox" --nccl "${REAL_NCCL_LIBRARY}" --gpu
           ${faulty} -- $<TARGET_FILE:faults>)
  set_tests_properties(gpu.faults.mailbox PROPERTIES LABELS gpu TIMEOUT 120 RUN_SERIAL ON)
endif()

if(WINDLASS_LIBRARY_DIR)
  foreach(program IN LISTS MESSAGING)
    if(SIM_DIR)
      add_meeting(${program} sim mailbox 300 yes --served mailbox)
    endif()
    if(REAL_NCCL_LIBRARY)
      add_meeting(${program} gpu mailbox 300 yes --served mailbox)
    endif()
    # `sendrecv` has this row above.
    if(program IN_LIST LAZY AND NOT program STREQUAL "sendrecv")
      set(options --served mailbox --promised --set WINDLASS_LAZY=all)
      if(SIM_DIR)
        add_meeting(${program} sim lazy 300 yes ${options})
      endif()
      if(REAL_NCCL_LIBRARY)
        add_meeting(${program} gpu lazy 300 yes ${options})
      endif()
    endif()
  endforeach()
endif()

# What the plain run makes of them is the reference, and the stand-in's arithmetic is the host's.
add_executable(special_values programs/special_values.c)
target_link_libraries(special_values PRIVATE harness)
if(REAL_NCCL_LIBRARY)
  add_differential(special_values gpu 120)
  if(WINDLASS_LIBRARY_DIR)
    add_fabric_on(gpu special_values 120 "yes" --served fast)
  endif()
endif()

# Without a plain run: NCCL 2.30.7 alone did not end where four ranks shared a GPU (why was not looked into).
add_executable(crowded programs/crowded.c)
target_link_libraries(crowded PRIVATE harness)
if(WINDLASS_LIBRARY_DIR)
  set(crowd --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --served fast -- $<TARGET_FILE:crowded>)
  if(SIM_DIR)
    add_test(NAME sim.crowded.fast COMMAND ${RUN} --out "${RUNS}/sim.crowded.fast" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" ${crowd})
    set_tests_properties(sim.crowded.fast PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2)
  endif()
  if(REAL_NCCL_LIBRARY)
    add_test(NAME gpu.crowded.fast COMMAND ${RUN} --out "${RUNS}/gpu.crowded.fast" --nccl "${REAL_NCCL_LIBRARY}" --gpu ${crowd})
    set_tests_properties(gpu.crowded.fast PROPERTIES LABELS gpu TIMEOUT 300 RUN_SERIAL ON)
  endif()
endif()

# Graphs of several captures, of which NCCL orders nothing: within a fabric alone.
add_executable(shared_graphs programs/shared_graphs.c)
target_link_libraries(shared_graphs PRIVATE harness)
if(WINDLASS_LIBRARY_DIR)
  set(sharing --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --served mailbox)
  if(SIM_DIR)
    add_test(NAME sim.shared_graphs.mailbox COMMAND ${RUN} --out "${RUNS}/sim.shared_graphs.mailbox"
             --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" ${sharing} -- $<TARGET_FILE:shared_graphs>)
    set_tests_properties(sim.shared_graphs.mailbox PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2 SKIP_RETURN_CODE 77)
  endif()
  if(REAL_NCCL_LIBRARY)
    add_test(NAME gpu.shared_graphs.mailbox COMMAND ${RUN} --out "${RUNS}/gpu.shared_graphs.mailbox"
             --nccl "${REAL_NCCL_LIBRARY}" --gpu ${sharing} -- $<TARGET_FILE:shared_graphs>)
    set_tests_properties(gpu.shared_graphs.mailbox PROPERTIES LABELS gpu TIMEOUT 300 RUN_SERIAL ON SKIP_RETURN_CODE 77)
  endif()
endif()

# Every name of every release is ours.
add_executable(symbols programs/symbols.c)
target_link_libraries(symbols PRIVATE harness)
file(GLOB EXPORT_LISTS CONFIGURE_DEPENDS "${ROOT}/abi/exports/*.txt")
if(SIM_DIR)
  add_run(symbols sim plain 60 "${ROOT}/abi/exports/2.28.9.txt")
  if(WINDLASS_LIBRARY_DIR)
    add_run(symbols sim windlass 60 ${EXPORT_LISTS})
  endif()
endif()

# What the driver says of addresses, and who waits for whom in it: on GPUs alone, without NCCL.
add_executable(buffer_ids programs/buffer_ids.c support/driver_answers.c support/imported_memory.c)
target_link_libraries(buffer_ids PRIVATE ${CMAKE_DL_LIBS})
add_executable(driver_beside programs/driver_beside.c support/driver_answers.c support/imported_memory.c)
target_link_libraries(driver_beside PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
add_executable(driver_beside_two programs/driver_beside_two.c support/driver_answers.c support/imported_memory.c)
target_link_libraries(driver_beside_two PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
if(SIM_DIR)
  add_test(NAME sim.driver_beside_two COMMAND driver_beside_two)
  set_tests_properties(sim.driver_beside_two PROPERTIES LABELS sim TIMEOUT 60 PROCESSORS 2 ENVIRONMENT "LD_LIBRARY_PATH=${SIM_DIR}")
endif()
if(REAL_NCCL_LIBRARY)
  add_test(NAME gpu.driver_beside_two COMMAND driver_beside_two)
  set_tests_properties(gpu.driver_beside_two PROPERTIES LABELS gpu TIMEOUT 60 RUN_SERIAL ON SKIP_RETURN_CODE 77)
  add_test(NAME gpu.driver_beside COMMAND driver_beside)
  set_tests_properties(gpu.driver_beside PROPERTIES LABELS gpu TIMEOUT 60 RUN_SERIAL ON SKIP_RETURN_CODE 77)
  add_test(NAME gpu.buffer_ids COMMAND buffer_ids)
  set_tests_properties(gpu.buffer_ids PROPERTIES LABELS gpu TIMEOUT 150 RUN_SERIAL ON SKIP_RETURN_CODE 77)
endif()

# The harness and the runner fail where they must.
add_executable(harness_proof programs/harness_proof.c)
target_link_libraries(harness_proof PRIVATE harness)
if(SIM_DIR)
  add_test(NAME sim.proof COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/proof.py" "${SIM_DIR}"
           $<TARGET_FILE:harness_proof> $<TARGET_FILE:premulsum> "${RUNS}/proof")
  set_tests_properties(sim.proof PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()
