# What every binary is compiled and linked with beside its own flags: guards against what
# a hostile file might try, and nothing of the folder it was built in. tests/install/
# test_elf.sh looks at the result.

include(CheckCCompilerFlag)
include(CheckPIESupported)

# The same sources give the same bits wherever they lie: debug information and asserts
# name files relative to the source folder.
add_compile_options("$<$<COMPILE_LANGUAGE:C>:-ffile-prefix-map=${PROJECT_SOURCE_DIR}=.>"
  "$<$<COMPILE_LANGUAGE:C>:-ffile-prefix-map=${CMAKE_BINARY_DIR}=build>")

# Programs are loaded at an address of the system's choice. So are libraries anyway.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
check_pie_supported(LANGUAGES C)

# Tables of functions are read-only once the program runs; the stack holds no code.
add_link_options(LINKER:-z,relro LINKER:-z,now LINKER:-z,noexecstack)

# Sanitizers see more, and FORTIFY's own checks would hide it from them.
if(NOT STILL_SANITIZE AND NOT STILL_FUZZ)
  add_compile_options($<$<COMPILE_LANGUAGE:C>:-fstack-protector-strong>)
  # Level 3 also follows sizes that are known at run time: gcc 12, clang 9.
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU" AND CMAKE_C_COMPILER_VERSION VERSION_LESS 12)
    set(level 2)
  else()
    set(level 3)
  endif()
  add_compile_options("$<$<COMPILE_LANGUAGE:C>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=${level}>")
  check_c_compiler_flag(-fcf-protection HAS_CF_PROTECTION) # x86: CET
  if(HAS_CF_PROTECTION)
    add_compile_options($<$<COMPILE_LANGUAGE:C>:-fcf-protection>)
  endif()
endif()
