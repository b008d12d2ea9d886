# Writes files as a C table (src/server/page.h). The text depends on their names and bytes
# alone, so that builds anywhere are the same.
#
#   cmake -D OUT=FILE.c -D FILES=A,B,... -P embed.cmake
#
# With ARRAY, one file as an array of that name and its size, ARRAY_size, which HEADER
# declares:
#
#   cmake -D OUT=FILE.c -D FILES=A -D ARRAY=name -D HEADER=a/b.h -P embed.cmake
if(DEFINED ARRAY)
  file(READ ${FILES} HEX HEX)
  string(REGEX REPLACE "(..)" "0x\\1," BYTES "${HEX}")
  string(REGEX REPLACE "((0x..,)(0x..,)(0x..,)(0x..,)(0x..,)(0x..,)(0x..,)(0x..,))" "\\1\n"
    BYTES "${BYTES}")
  file(WRITE ${OUT} "/* Made by cmake/embed.cmake. */\n#include \"${HEADER}\"\n\n"
    "const unsigned char ${ARRAY}[] = {\n${BYTES}};\n"
    "const size_t ${ARRAY}_size = sizeof ${ARRAY};\n")
  return()
endif()
string(REPLACE "," ";" FILES "${FILES}")
set(TYPE_.html "text/html; charset=utf-8")
set(TYPE_.css "text/css; charset=utf-8")
set(TYPE_.js "text/javascript; charset=utf-8")
set(TYPE_.svg "image/svg+xml")
set(TEXT "/* Made by cmake/embed.cmake. */\n#include \"server/page.h\"\n\n")
set(ROWS "")
set(I 0)
foreach(FILE ${FILES})
  get_filename_component(NAME ${FILE} NAME)
  get_filename_component(EXT ${FILE} EXT)
  if(NOT DEFINED TYPE_${EXT})
    message(FATAL_ERROR "${FILE}: no type for files ${EXT}")
  endif()
  file(READ ${FILE} HEX HEX)
  file(SHA256 ${FILE} HASH)
  string(SUBSTRING ${HASH} 0 16 HASH)
  string(REGEX REPLACE "(..)" "0x\\1," BYTES "${HEX}")
  string(REGEX REPLACE "((0x..,)(0x..,)(0x..,)(0x..,)(0x..,)(0x..,)(0x..,)(0x..,))" "\\1\n"
    BYTES "${BYTES}")
  string(APPEND TEXT "static const unsigned char file_${I}[] = {\n${BYTES}};\n")
  string(APPEND ROWS "    {\"/${NAME}\", \"${TYPE_${EXT}}\", \"\\\"${HASH}\\\"\", file_${I},\n"
    "     sizeof file_${I}},\n")
  math(EXPR I "${I} + 1")
endforeach()
string(APPEND TEXT "\nconst srv_page_file srv_page_files[] = {\n${ROWS}};\n"
  "const size_t srv_page_count = sizeof srv_page_files / sizeof *srv_page_files;\n")
file(WRITE ${OUT} "${TEXT}")
