# Lets `pip install .` and `colcon build` use the ROS 2 packages of PyPI. On a robot, where /opt/ros provides
# them, this file is not used. It is injected right after project(), through CMAKE_PROJECT_flashrt_ros_INCLUDE.

# Find the ROS wheels of the Python that builds: their CMake files lie in its prefix.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c
    "import pathlib, rosidl_pycommon; print(pathlib.Path(rosidl_pycommon.__file__).parents[4])"
  OUTPUT_VARIABLE wheels_prefix
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE failed
)
if(failed)
  message(FATAL_ERROR
    "${Python3_EXECUTABLE} cannot import rosidl_pycommon, so there are no ROS wheels to build against. "
    "Install the build requirements of pyproject.toml there; on a machine with /opt/ros, build without "
    "cmake/pip_wheels.cmake."
  )
endif()
list(PREPEND CMAKE_PREFIX_PATH "${wheels_prefix}")
set(ENV{AMENT_PREFIX_PATH} "${wheels_prefix}")

# The imported targets of the wheels name include folders of the machine that built them. CMake refuses a folder
# that does not exist.
function(drop_missing_include_folders target)
  get_target_property(folders ${target} INTERFACE_INCLUDE_DIRECTORIES)
  if(NOT folders)
    return()
  endif()
  set(present "")
  foreach(folder IN LISTS folders)
    if(folder MATCHES "^\\$<" OR EXISTS "${folder}")
      list(APPEND present "${folder}")
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${present}")
endfunction()

# The generated Python library exports NumPy's include folder. CMake refuses to export a folder inside the source
# tree, which that one is when the environment is ./.venv; whoever uses the installed library has NumPy's own.
function(keep_source_folders_private target)
  get_target_property(folders ${target} INTERFACE_INCLUDE_DIRECTORIES)
  if(NOT folders)
    return()
  endif()
  set(exported "")
  foreach(folder IN LISTS folders)
    string(FIND "${folder}" "${CMAKE_SOURCE_DIR}/" position)
    if(position EQUAL 0)
      set(folder "$<BUILD_INTERFACE:${folder}>")
    endif()
    list(APPEND exported "${folder}")
  endforeach()
  set_target_properties(${target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${exported}")
endfunction()

# Runs at the end of CMakeLists.txt, when every target is known.
function(mend_targets)
  get_property(imported DIRECTORY "${CMAKE_SOURCE_DIR}" PROPERTY IMPORTED_TARGETS)
  foreach(target IN LISTS imported)
    drop_missing_include_folders(${target})
  endforeach()
  get_property(ours DIRECTORY "${CMAKE_SOURCE_DIR}" PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS ours)
    keep_source_folders_private(${target})
  endforeach()
endfunction()
cmake_language(DEFER CALL mend_targets)
